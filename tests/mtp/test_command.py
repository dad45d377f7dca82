"""`specverify checkpoint` without SGLang, PyTorch or a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.conftest import Run
from tests.cli.conftest import run as run  # a fixture
from tests.mtp.checkpoints import Written

_PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["sglang"] = sys.modules["safetensors"] = None
from sglang_specverify.cli import main
main(["checkpoint", sys.argv[1], "--json"])
"""


def test_module_by_module_with_the_witness(run: Run, written: dict[str, Written], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    outcome = run("checkpoint", str(written["mixed"].directory))
    assert outcome.code == 0 and outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[1] == "quantisation quark; MTP: mixed, routed experts"
    (experts,) = [line for line in lines if line.split()[:1] == ["mtp.layers.0.mlp.experts"]]
    for said in (" mxfp4 ", "12 weights, the first U8 [64, 16], scale U8 [64, 1]", "the same: mxfp4"):
        assert said in experts
    (attention,) = [line for line in lines if line.split()[:1] == ["mtp.layers.0.self_attn.o_proj"]]
    assert " bf16 " in attention and "the same: excluded by 'mtp.layers.0.self_attn.o_proj'" in attention
    assert "with --attention-backend specverify, built as the files hold it" in outcome.out


def test_a_disagreement_is_shown(run: Run, written: dict[str, Written], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    out = run("checkpoint", str(written["all bf16, not listed"].directory)).out
    assert out.count("config.json says mxfp4 and does not exclude it; the files decide: bf16") == 5


def test_json_without_sglang_and_torch(written: dict[str, Written]) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(written["mixed, experts bf16"].directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["quantisation"], found["mtp"]) == ("quark", "mixed, routed experts")
    modules = {module["module"]: module for module in found["modules"]}
    assert modules["mtp.layers.0.self_attn.qkv_proj"]["type"] == "mxfp4"
    assert modules["mtp.layers.0.mlp.experts"]["type"] == "bf16"
    assert len(modules["mtp.layers.0.mlp.experts"]["stored"]) == 12
    stored = modules["mtp.layers.0.self_attn.o_proj"]["stored"][0]
    assert stored == {
        "module": "mtp.layers.0.self_attn.o_proj",
        "type": "mxfp4",
        "scales": "per_group",
        "witness": "U8 [64, 32], scale U8 [64, 2]",
        "file": "model.safetensors",
    }


def test_contradictory_is_bad_input_that_names_the_tensor(run: Run, written: dict[str, Written]) -> None:
    outcome = run("checkpoint", str(written["a few experts excluded"].directory))
    assert (outcome.code, outcome.out) == (2, "")
    assert "mtp.layers.0.mlp.experts.2.down_proj" in outcome.err and "remedy: " in outcome.err


@pytest.mark.parametrize(
    ("name", "flag", "says"),
    [
        ("not quantised", None, "quantisation none, not quark: left to SGLang"),
        ("FP8", None, "quantisation fp8, not quark: left to SGLang"),
        ("mixed", "MTP=0", "left to SGLang, which goes by the exclude list: SGLANG_SPECVERIFY_MTP=0"),
        ("mixed", "DISABLE=1", "left to SGLang, which goes by the exclude list: SGLANG_SPECVERIFY_DISABLE=1"),
    ],
)
def test_who_builds_it(
    name: str, flag: str | None, says: str, run: Run, written: dict[str, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    if flag is not None:
        monkeypatch.setenv(*f"SGLANG_SPECVERIFY_{flag}".split("=", 1))
    outcome = run("checkpoint", str(written[name].directory), "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["outcome"] == says


def test_no_checkpoint(run: Run, tmp_path: object) -> None:
    outcome = run("checkpoint", str(tmp_path))
    assert outcome.code == 2 and "config.json cannot be read" in outcome.err
    assert run("checkpoint").code == 2
