"""Each server line that the door refuses: the message, its remedy, and that `specverify explain` refuses it alike."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_specverify.door.resolution import check_plugin_filter
from sglang_specverify.errors import SpecverifyError
from tests.door.resolve import CHAIN, NGRAM, PLUGIN, TREE, arguments, explained, resolve

_TBO = "--enable-two-batch-overlap"


@dataclass(frozen=True)
class Refusal:
    machine: str
    line: str
    what: str
    remedy: str
    environment: tuple[tuple[str, str], ...] = ()
    model: str = "qwen3"
    #: Whether `explain`, which knows neither the process nor SGLang's rules for one model, refuses it too.
    explained: bool = True


REFUSALS = {
    "Ray": Refusal("SM90", f"{PLUGIN} --use-ray", "Ray actors load no plugin", "leave --use-ray out"),
    "gRPC mode": Refusal(
        "SM90",
        f"{PLUGIN} --smg-grpc-mode",
        "no handshake would show whether they hold the plugin",
        "serve over HTTP",
    ),
    "plugin filter": Refusal(
        "SM90",
        PLUGIN,
        "SGLANG_PLUGINS=other,another leaves the plugin specverify out",
        "add specverify to SGLANG_PLUGINS",
        (("SGLANG_PLUGINS", "other,another"),),
        explained=False,
    ),
    "decode alone": Refusal(
        "SM90",
        f"--decode-attention-backend specverify {TREE}",
        "verify would not reach the plugin: with --speculative-attention-mode prefill the prefill backend verifies",
        "--prefill-attention-backend specverify",
    ),
    "decode with another prefill": Refusal(
        "none",
        f"--prefill-attention-backend triton --decode-attention-backend specverify {CHAIN}",
        "the prefill backend verifies, and that is triton",
        "--speculative-attention-mode decode",
    ),
    "prefill alone, decode verifies": Refusal(
        "SM90",
        f"--prefill-attention-backend specverify --speculative-attention-mode decode {TREE}",
        "with --speculative-attention-mode decode the decode backend verifies",
        "--speculative-attention-mode prefill",
    ),
    "overlap of a tree's batches": Refusal(
        "SM90", f"{PLUGIN} {TREE} {_TBO}", "with topk 4 .> 1. is not served", "leave --enable-two-batch-overlap out"
    ),
    "overlap of a tree that SGLang chooses": Refusal(
        "SM90",
        f"{PLUGIN} --speculative-algorithm EAGLE --speculative-draft-model-path {{qwen3}} {_TBO}",
        "with topk 4 .> 1. is not served",
        "--speculative-eagle-topk 1",
        model="llama-128",
    ),
    "overlap of a tree, in lower case": Refusal(
        "SM90",
        f"{PLUGIN} --speculative-algorithm eagle --speculative-draft-model-path {{qwen3}} {_TBO}",
        "with topk 4 .> 1. is not served",
        "--speculative-eagle-topk 1",
        model="llama-128",
    ),
    "NGRAM on pages, in lower case": Refusal(
        "SM90",
        f"{PLUGIN} {NGRAM.replace('NGRAM', 'ngram')} --page-size 16",
        "breadth 10 .> 1. needs page size 1; page size 16 came",
        "--page-size 1",
    ),
    "NGRAM on pages": Refusal(
        "SM90", f"{PLUGIN} {NGRAM} --page-size 16", "breadth 10 .> 1. needs page size 1; page size 16 came", "--page-size 1"
    ),
    "fa3 on Blackwell": Refusal(
        "SM100",
        PLUGIN,
        "SGLANG_SPECVERIFY_BASE=fa3 cannot serve here: fa3 does not run on SM100",
        "choose one that can: fa4, triton",
        (("SGLANG_SPECVERIFY_BASE", "fa3"),),
    ),
    "fa4 for a head dim": Refusal(
        "SM103",
        PLUGIN,
        "fa4 on SM103 has no paged kernel for head dim 256",
        "choose one that can: triton",
        (("SGLANG_SPECVERIFY_BASE", "fa4"),),
        "llama-256",
    ),
    "fa3 for a cache": Refusal(
        "SM90",
        f"{PLUGIN} --kv-cache-dtype fp8_e5m2",
        "fa3 does not read a fp8_e5m2 cache",
        "choose one that can: triton",
        (("SGLANG_SPECVERIFY_BASE", "fa3"),),
    ),
    "aiter that is not there": Refusal(
        "gfx950",
        PLUGIN,
        "the package aiter is not installed",
        "choose one that can: triton",
        (("SGLANG_SPECVERIFY_BASE", "aiter"),),
    ),
    "aiter on NVIDIA": Refusal(
        "SM90",
        PLUGIN,
        "aiter does not run on SM90",
        "choose one that can: fa3, fa4, triton",
        (("SGLANG_SPECVERIFY_BASE", "aiter"),),
    ),
    "a GPU's base without one": Refusal(
        "none",
        PLUGIN,
        "fa3 needs a GPU",
        "choose one that can: triton",
        (("SGLANG_SPECVERIFY_BASE", "fa3"),),
    ),
    "an unknown base": Refusal(
        "none",
        PLUGIN,
        "SGLANG_SPECVERIFY_BASE='fa2' is not one of auto, fa3, fa4, triton, aiter",
        "unset SGLANG_SPECVERIFY_BASE",
        (("SGLANG_SPECVERIFY_BASE", "fa2"),),
    ),
    "a flag's value": Refusal(
        "none",
        PLUGIN,
        "SGLANG_SPECVERIFY_STRICT='maybe' is not a boolean",
        "set SGLANG_SPECVERIFY_STRICT to 0 or 1",
        (("SGLANG_SPECVERIFY_STRICT", "maybe"),),
    ),
    "an unknown flag": Refusal(
        "none",
        PLUGIN,
        "SGLANG_SPECVERIFY_CHIAN is not a flag",
        "did you mean SGLANG_SPECVERIFY_CHAIN",
        (("SGLANG_SPECVERIFY_CHIAN", "0"),),
    ),
    "a model that the only base does not serve": Refusal(
        "none",
        PLUGIN,
        "no base can serve this on no GPU: triton: SGLang refuses triton for Lfm2ForCausalLM",
        "leave specverify out: SGLang then chooses a backend",
        model="lfm2",
    ),
    "a base for a model that SGLang refuses with it": Refusal(
        "SM90",
        PLUGIN,
        "SGLANG_SPECVERIFY_BASE=triton cannot serve here: SGLang refuses triton for Lfm2ForCausalLM",
        "choose one that can: fa3, fa4",
        (("SGLANG_SPECVERIFY_BASE", "triton"),),
        "lfm2",
    ),
}


@pytest.mark.usefixtures("door")
@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = REFUSALS[case]
    for name, value in wanted.environment:
        monkeypatch.setenv(name, value)
    line = arguments(wanted.machine, models, wanted.model, wanted.line)
    with pytest.raises(SpecverifyError, match=wanted.what) as raised:
        resolve(wanted.machine, line)
    assert wanted.remedy in raised.value.remedy
    assert len(str(raised.value).splitlines()) == 2
    if wanted.explained:
        with pytest.raises(SpecverifyError, match=wanted.what) as said:
            explained(wanted.machine, line, aiter=False)
        assert said.value.remedy == raised.value.remedy


@pytest.mark.parametrize(
    "value", ["", "specverify", "other, specverify", ",specverify,", " ", ",", " , ", "other", "specverify2"]
)
@pytest.mark.usefixtures("unregistered")
def test_plugin_filters_are_read_as_sglang_reads_them(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loader, asked which of the installed plugins it lets in."""
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group

    monkeypatch.setenv("SGLANG_PLUGINS", value)
    if "specverify" in load_plugins_by_group(GENERAL_PLUGINS_GROUP):
        assert not value or "specverify" in value.replace(" ", "").split(",")
        check_plugin_filter(value)
    else:
        assert value.strip(" ,") in ("", "other", "specverify2") and value
        with pytest.raises(SpecverifyError, match="leaves the plugin specverify out") as raised:
            check_plugin_filter(value)
        assert raised.value.remedy == "add specverify to SGLANG_PLUGINS, or unset it"


@pytest.mark.usefixtures("door")
@pytest.mark.parametrize("value", [" ", ","])
def test_a_plugin_filter_without_a_name_is_refused(value: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    with pytest.raises(SpecverifyError, match="leaves the plugin specverify out"):
        resolve("SM90", arguments("SM90", models, "qwen3", PLUGIN))


@pytest.mark.usefixtures("door")
def test_a_rule_that_forces_a_backend_without_a_subclass(models: dict[str, Path]) -> None:
    """One that the door does not know of, such as another plugin's for a model."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    def force(server_args: Any, previous: Any) -> None:
        previous(server_args)
        declare_resolution(server_args, "a test", attention_backend="flashinfer")

    register_resolution_hook("handle_model_specific_adjustments")(force)
    with pytest.raises(SpecverifyError, match="no subclass for what they chose: --attention-backend became flashinfer") as raised:
        resolve("SM90", arguments("SM90", models, "qwen3", PLUGIN))
    assert "leave --attention-backend out" in raised.value.remedy


@pytest.mark.usefixtures("door")
def test_nothing_is_watched_after_a_refusal(models: dict[str, Path]) -> None:
    from sglang.srt.entrypoints.engine import Engine

    with pytest.raises(SpecverifyError):
        resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE} {_TBO}"))
    assert not getattr(Engine._launch_scheduler_processes, "_specverify", False)


@pytest.mark.usefixtures("door")
def test_the_launcher_is_watched_unless_the_plugin_is_off(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints.engine import Engine

    stock = Engine._launch_scheduler_processes
    monkeypatch.setenv("SGLANG_SPECVERIFY_DISABLE", "1")
    resolve("SM90", arguments("SM90", models, "qwen3", PLUGIN))
    assert Engine._launch_scheduler_processes == stock
    monkeypatch.setenv("SGLANG_SPECVERIFY_DISABLE", "0")
    resolve("SM90", arguments("SM90", models, "qwen3", PLUGIN))
    assert getattr(Engine._launch_scheduler_processes, "_specverify", False)


BAD_LINES = {
    "unknown base": ({"SGLANG_SPECVERIFY_BASE": "fa2"}, [], "SGLANG_SPECVERIFY_BASE='fa2' is not one of"),
    "decode alone": (
        {},
        ["--decode-attention-backend", "specverify", "--speculative-algorithm", "NGRAM"],
        "verify would not reach the plugin",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_two_plain_lines_and_no_traceback(case: str, models: dict[str, Path]) -> None:
    """The real command: the error is the last thing on the screen, and no server process was started for it."""
    import os

    extra, given, what = BAD_LINES[case]
    backend = given or ["--attention-backend", "specverify"]
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", **extra}
    command = [sys.executable, "-m", "sglang.launch_server", "--device", "cpu", "--model-path", str(models["qwen3"]), *backend]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    *_, error, remedy = ended.stderr.strip().splitlines()
    assert error.startswith("specverify: error: ") and what in error
    assert remedy.startswith("  remedy: ")
    assert "Traceback" not in ended.stderr + ended.stdout
