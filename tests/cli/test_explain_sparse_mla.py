"""`specverify explain` for a model that SGLang's dsv4 backend serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.routing.configs import MODELS

V41 = str(MODELS / "deepseek-v4.1-flash.json")
FLAGS = ("SPARSE_MLA", "FP4_POOL")


def sparse(run: Run, hardware: str, *line: str) -> dict[str, Any]:
    outcome = run("explain", "--model", V41, "--hardware", hardware, "--json", "--", *line)
    assert outcome.code == 0, outcome.err
    said = json.loads(outcome.out)
    # Its attention reaches no backend that a line names.
    assert said["routes"] == [] and any("dsv4 backend" in note for note in said["notes"])
    found: dict[str, Any] = said["sparse_mla"]
    return found


def served(found: dict[str, Any]) -> list[str]:
    return [row["kernel"] for row in found["layers"]]


@pytest.mark.parametrize(
    ("flags", "hardware", "line", "pool", "kernel", "reason"),
    [
        ((), "H200", (), "stock", "stock", "off by default: SGLANG_SPECVERIFY_SPARSE_MLA=1 asks for it"),
        (FLAGS[:1], "H200", (), "stock", "stock", "rows of 584 bytes (v4) in the window's cache (SGLANG_SPECVERIFY_FP4_POOL=1"),
        (FLAGS, "H200", (), "fp4_pool", "sparse_mla", "window rows of 528 bytes"),
        (FLAGS, "H200", ("--dsv4-prefill-backend", "flashmla_sparse_q8"), "stock", "stock", "rows of 584 bytes"),
        (FLAGS[:1], "B200", (), "stock", "stock", "--dsv4-attn-backend flashmla_mega has a path of its own"),
        (FLAGS[:1], "B200", ("--tp-size", "4"), "stock", "stock", "SGLANG_DSV4_KV_LAYOUT=v41 makes those of V4.1"),
        (FLAGS[:1], "gfx950", (), "stock", "stock", "on AMD SGLang runs another dsv4 backend"),
    ],
)  # fmt: skip
def test_who_serves_and_why(
    flags: tuple[str, ...], hardware: str, line: tuple[str, ...], pool: str, kernel: str, reason: str, run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in flags:
        monkeypatch.setenv(f"SGLANG_SPECVERIFY_{name}", "1")
    found = sparse(run, hardware, *line)
    assert [(row["ratio"], row["layers"]) for row in found["layers"]] == [(0, 2), (1, 20), (2, 18)]
    assert found["pool"]["kernel"] == pool and served(found) == [kernel] * 3
    assert all(reason in row["reason"] for row in found["layers"])


def test_rows_that_sglang_makes_on_sm100(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_SPARSE_MLA", "1")
    monkeypatch.setenv("SGLANG_DSV4_KV_LAYOUT", "v41")
    assert served(sparse(run, "B200", "--dsv4-attn-backend", "flashmla")) == ["sparse_mla"] * 3
    monkeypatch.setenv("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", "fp8")
    assert served(sparse(run, "B200", "--dsv4-attn-backend", "flashmla")) == ["sparse_mla", "stock", "stock"]


def test_for_people(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for name in FLAGS:
        monkeypatch.setenv(f"SGLANG_SPECVERIFY_{name}", "1")
    outcome = run("explain", "--model", V41, "--hardware", "H200")
    assert "20 × ratio 1, rows v41 + v41_fp4: sparse_mla:" in outcome.out
    assert "2 × window alone, rows v41: sparse_mla:" in outcome.out
    assert "would not start" not in outcome.out


def test_layers_that_nothing_would_serve(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pool of V4.1's rows for a model of V4, whose selected rows have 528 bytes there."""
    config = {**json.loads(Path(V41).read_text()), "model_type": "deepseek_v4", "compress_ratios": [0, 4], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in FLAGS:
        monkeypatch.setenv(f"SGLANG_SPECVERIFY_{name}", "1")
    outcome = run("explain", "--model", str(tmp_path), "--hardware", "H200", "--json")
    assert json.loads(outcome.out)["refused"].startswith("sparse MLA: rows of 528 bytes (v41) among the selected")


def test_what_would_not_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("SGLANG_SPECVERIFY_SPARSE_MLA", "1")
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    assert "this server would not start: sparse MLA:" in run("explain", "--model", V41, "--hardware", "H200").out
    monkeypatch.setenv("SGLANG_SPECVERIFY_SPARSE_MLA", "0")
    monkeypatch.setenv("SGLANG_SPECVERIFY_FP4_POOL", "1")
    outcome = run("explain", "--model", V41, "--hardware", "H200")
    assert outcome.code == 2 and "nothing would read the pool" in outcome.err
