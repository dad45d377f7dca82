"""A server line: which options are read, in which spellings, and what SGLang makes of the ones left out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing import ServerFacts
from sglang_specverify.routing.model import describe
from sglang_specverify.routing.options import parse
from sglang_specverify.routing.server import server_facts
from tests.routing.configs import GEMMA_2_9B, LLAMA_3_70B, QWEN3_8B, Config

LLAMA = {**LLAMA_3_70B, "architectures": ["LlamaForCausalLM"]}


def facts(line: str, config: Config = QWEN3_8B, has_gpu: bool = True) -> ServerFacts:
    return server_facts(parse(line.split()), describe(config), "fa3", has_gpu)


def test_an_empty_line_is_a_server_without_speculation() -> None:
    assert facts("") == ServerFacts("fa3")


@pytest.mark.parametrize(
    ("line", "config", "tree"),
    [
        ("--speculative-algorithm EAGLE", QWEN3_8B, ("EAGLE", 1, 3, 4)),
        ("--speculative-algorithm NEXTN", QWEN3_8B, ("EAGLE", 1, 3, 4)),
        ("--speculative-algorithm EAGLE3", LLAMA, ("EAGLE3", 4, 5, 8)),
        ("--speculative-algorithm STANDALONE", LLAMA, ("STANDALONE", 1, 3, 4)),
        (
            "--speculative-algorithm EAGLE --speculative-num-steps 8 --speculative-eagle-topk 16 "
            "--speculative-num-draft-tokens 128",
            QWEN3_8B,
            ("EAGLE", 16, 8, 128),
        ),
        # A chain's length follows from its steps, whatever the line says.
        (
            "--speculative-algorithm EAGLE --speculative-num-steps=5 --speculative-eagle-topk=1 "
            "--speculative-num-draft-tokens=99",
            QWEN3_8B,
            ("EAGLE", 1, 5, 6),
        ),
        ("--speculative-algorithm NGRAM", QWEN3_8B, ("NGRAM", 10, 1, 12)),
        (
            "--speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1 --speculative-num-draft-tokens 8",
            QWEN3_8B,
            ("NGRAM", 1, 8, 8),
        ),
        ("--speculative-algorithm DFLASH --speculative-dflash-block-size 16", QWEN3_8B, ("DFLASH", 1, 1, 16)),
        ("--speculative-algorithm EAGLE --speculative-num-steps 0 --speculative-eagle-topk 1", QWEN3_8B, ("EAGLE", 1, 0, 1)),
        ("--speculative-algorithm UNO --speculative-num-draft-tokens 5", QWEN3_8B, ("UNO", 1, 1, 5)),
        (
            "--speculative-algorithm UNO --speculative-num-draft-tokens 9 --speculative-eagle-topk 2 --speculative-num-steps 3",
            QWEN3_8B,
            ("UNO", 2, 3, 9),
        ),
        ("--speculative-algorithm EAGLE", {**QWEN3_8B, "architectures": ["IQuestQ1ForCausalLM"]}, ("EAGLE", 1, 7, 8)),
        ("--speculative-algorithm EAGLE --speculative-adaptive", LLAMA, ("EAGLE", 1, 3, 4)),
        # SGLang drops the option where it cannot adapt.
        ("--speculative-algorithm EAGLE --speculative-adaptive --enable-pdmux", LLAMA, ("EAGLE", 4, 5, 8)),
        ("--speculative-algorithm EAGLE --speculative-adaptive --enable-two-batch-overlap", LLAMA, ("EAGLE", 4, 5, 8)),
        ("--speculative-algorithm EAGLE --speculative-adaptive --enable-multi-layer-eagle", LLAMA, ("EAGLE", 4, 5, 8)),
        ("--speculative-algorithm EAGLE --speculative-adaptive --attn-dp-size 2 --tp 2", LLAMA, ("EAGLE", 4, 5, 8)),
    ],
)
def test_trees(line: str, config: Config, tree: tuple[str, int, int, int]) -> None:
    found = facts(line, config)
    assert (found.algorithm, found.topk, found.num_steps, found.num_draft_tokens) == tree


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("--page-size 64", {"page_size": 64}),
        ("--page-size=64", {"page_size": 64}),
        ("--kv-cache-dtype fp8_e5m2", {"kv_cache_dtype": "fp8_e5m2"}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float32", {"dtype": "float32"}),
        ("--disable-cuda-graph", {"cuda_graph": False}),
        ("--disable-decode-cuda-graph", {"cuda_graph": False}),
        ("--cuda-graph-backend-decode disabled", {"cuda_graph": False}),
        ("--enable-deterministic-inference", {"deterministic": True}),
        ("--rl-on-policy-target fsdp", {"deterministic": True}),
        ("--context-length 128k", {"context": 128000}),
        ("--context-length 128Ki", {"context": 131072}),
        ("--context-length 4096", {"context": 4096}),
        ("--max-running-requests 4", {"requests": 4}),
        # The beginning of an option is as good as all of it, where no other one begins alike.
        ("--page-si 64", {"page_size": 64}),
        ("--context-l=4Ki --enable-det", {"context": 4096, "deterministic": True}),
        ("--disable-cuda-graph-p", {}),
        ("--enable-two-batch-overlap", {"two_batch_overlap": True}),
        ("--enable-kv-cache-sharding", {"unknown": frozenset({"KV cache sharding"})}),
        ("--enable-unified-memory", {"unknown": frozenset({"unified memory pool"})}),
        ("--enable-page-major-kv-layout", {"unknown": frozenset({"cache pool PageMajorMHATokenToKVPool"})}),
        ("--enable-pdmux", {"unknown": frozenset({"prefill-decode multiplexing"})}),
        ("--dcp-size 2", {"unknown": frozenset({"decode context parallelism"})}),
        ("--attn-cp-size 2 --tp-size 2", {"unknown": frozenset({"prefill context parallelism"})}),
        ("--dcp-size 1 --attn-cp-size 1", {}),
        ("--dllm-algorithm LowConfidence", {"unknown": frozenset({"diffusion language model"})}),
        # Options of no concern, their values, positional leftovers and a repeated option: the last one counts.
        ("--host 0.0.0.0 --port 30000 -x stray --page-size 16 --page-size 32", {"page_size": 32}),
    ],
)
def test_one_option_changes_one_fact(line: str, changes: dict[str, object]) -> None:
    assert facts(line) == dataclasses.replace(ServerFacts("fa3"), **changes)  # type: ignore[arg-type]


def test_without_a_gpu_there_are_no_graphs() -> None:
    assert not facts("", has_gpu=False).cuda_graph


def test_sglang_does_not_serve_float32_unasked() -> None:
    assert facts("", GEMMA_2_9B).dtype == "bfloat16"
    assert facts("", {**QWEN3_8B, "torch_dtype": "float32"}).dtype == "float16"
    assert facts("--dtype float32", GEMMA_2_9B).dtype == "float32"


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("", 1),
        ("--tp-size 8", 8),
        ("--tp 8", 8),
        ("--tensor-parallel-size=8", 8),
        ("--tp-size 8 --attn-dp-size 4", 2),
        ("--tp-size 8 --attn-dp-size 4 --enable-dp-attention", 2),
        ("--tp 4 --tp-size 2", 2),
        ("--tp-size 8 --dp-size 8 --enable-dp-attention", 1),
        # Replicas of the whole model share no heads.
        ("--tp-size 4 --dp-size 2", 4),
        ("--tp-size 8 --attn-cp-size 2", 4),
    ],
)
def test_ranks_that_share_the_heads(line: str, ranks: int) -> None:
    assert parse(line.split()).attention_ranks == ranks


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(SpecverifyError, match="--tp-size 4 does not divide by the 3 ranks"):
        _ = parse(["--tp-size", "4", "--attn-dp-size", "3"]).attention_ranks


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--page-size", "--page-size came without a value"),
        ("--page-size --port 3", "--page-size came without a value"),
        ("--page-size many", "--page-size many is no positive whole number"),
        ("--tp-size 0", "--tp-size 0 is no positive whole number"),
        ("--speculative-eagle-topk=-1", "--speculative-eagle-topk -1 is no positive whole number"),
        ("--speculative-num-steps -1", "--speculative-num-steps -1 is no whole number from 0"),
        ("--page-size 1k", "--page-size 1k is no positive whole number"),
        ("--context-length 1K", "--context-length 1K is no positive whole number"),
        ("--context-l", "--context-l came without a value"),
    ],
)
def test_lines_that_cannot_be_read(line: str, what: str) -> None:
    with pytest.raises(SpecverifyError, match=what):
        parse(line.split())


@pytest.mark.parametrize(
    ("line", "what", "remedy"),
    [
        (
            "EAGLE --speculative-num-steps 3",
            "--speculative-num-steps 3 came without --speculative-eagle-topk",
            "or leave all three out",
        ),
        (
            "EAGLE3 --speculative-eagle-topk 4",
            "came without --speculative-num-steps and --speculative-num-draft-tokens",
            "add --spec",
        ),
        (
            "EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4",
            "--speculative-num-steps 3 --speculative-eagle-topk 4 came without --speculative-num-draft-tokens",
            "add --speculative-num-draft-tokens",
        ),
        (
            "FROZEN_KV_MTP",
            "--speculative-algorithm FROZEN_KV_MTP came without .* chooses none of them",
            "add --speculative-num-steps",
        ),
        ("EAGLE --speculative-adaptive --speculative-num-steps 4", "which starts with 0, 1, 3, 5, 7", "choose one of them"),
    ],
)
def test_drafts_that_sglang_resolves_not(line: str, what: str, remedy: str) -> None:
    with pytest.raises(SpecverifyError, match=what) as caught:
        facts(f"--speculative-algorithm {line}")
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "text", ["[]", '{"1": {}}', '{"1": {"candidate_steps": 3}}', '{"1": {"candidate_steps": [-1]}}', "{}", "{"]
)
def test_files_of_adaptive_steps_that_are_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(SpecverifyError, match=f"--speculative-adaptive-config {path}"):
        facts(f"--speculative-algorithm EAGLE --speculative-adaptive --speculative-adaptive-config {path}")


@pytest.mark.parametrize("architecture", ["Step3p5ForCausalLM", "MiMoV2ForCausalLM"])
def test_targets_with_several_draft_layers_are_not_adaptive(architecture: str) -> None:
    """SGLang gives them several layers for EAGLE as it is written, not for NEXTN, which becomes EAGLE later."""
    config = {**QWEN3_8B, "architectures": [architecture]}
    line = "--speculative-adaptive --speculative-num-steps 5 --speculative-algorithm"
    found = facts(f"{line} NEXTN", config)
    assert (found.topk, found.num_steps, found.num_draft_tokens) == (1, 5, 6)
    with pytest.raises(SpecverifyError, match="came without --speculative-eagle-topk"):
        facts(f"{line} EAGLE", config)


def test_requests_that_sglang_limits_itself() -> None:
    assert facts("").requests == facts("--speculative-algorithm UNO").requests == 0
    assert facts("--speculative-algorithm EAGLE").requests == facts("--speculative-algorithm ngram").requests == 48
