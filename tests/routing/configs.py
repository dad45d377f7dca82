"""The model descriptions of `configs/models`: config.json files cut down to the keys that describe attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]

MODELS = Path(__file__).parents[2] / "configs" / "models"


def _read(name: str) -> Config:
    config: Config = json.loads((MODELS / f"{name.lower()}.json").read_text())
    return config


NAMED: dict[str, Config] = {
    name: _read(name) for name in ("Qwen3-8B", "Llama-3-70B", "gpt-oss-20b", "Qwen3.5", "DeepSeek-V3", "gemma-2-9b")
}
QWEN3_8B, LLAMA_3_70B, GPT_OSS_20B, QWEN3_5, DEEPSEEK_V3, GEMMA_2_9B = NAMED.values()
