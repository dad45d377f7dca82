from sglang.srt.models.qwen3_5_mtp import EntryClass as EntryClass
