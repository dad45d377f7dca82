"""When the hook does anything: for a Quark MTP model in a server that asks for the plugin, and otherwise nothing at all."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp import decide, install
from tests.mtp.checkpoints import Written, write
from tests.mtp.kinds import Kind

QUARK = SimpleNamespace(get_name=lambda: "quark", is_prequantized=True, kv_cache_group=[])


def _model(path: str | Path, architecture: str = install.MODEL) -> Any:
    hf_config = SimpleNamespace(architectures=[architecture])
    return SimpleNamespace(model_path=str(path), revision=None, hf_config=hf_config)


LOAD = SimpleNamespace(load_format=SimpleNamespace(value="auto"), download_dir=None)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The server's raw arguments, in a module that stands for SGLang's; they ask for the plugin."""
    names = ("prefill_attention_backend", "decode_attention_backend", "speculative_draft_attention_backend")
    arguments = SimpleNamespace(attention_backend="specverify", speculative_attention_mode="prefill", **dict.fromkeys(names))
    context = SimpleNamespace(get_server_args=lambda: arguments)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setattr(install, "_said", set())
    return arguments


class Stock:
    """`_initialize_model` as SGLang has it: remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self

    def was_called_as_it_came(self, *arguments: Any) -> bool:
        (call,) = self.calls
        return len(call) == len(arguments) and all(got is given for got, given in zip(call, arguments, strict=True))


def _untouched(model: Any, load: Any, quantisation: Any) -> bool:
    stock = Stock()
    return install.wrapped(stock)(model, load, quantisation) is stock and stock.was_called_as_it_came(model, load, quantisation)


@pytest.mark.parametrize("method", ["fp8", "modelopt_fp4", None, "quark of another model", "quark online"])
def test_any_other_model_is_untouched(method: str | None, server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("nothing may be asked for another model")

    monkeypatch.setattr(decide, "read_plan", refuse)
    monkeypatch.setattr(install, "_is_asked", refuse)
    online, other = method == "quark online", method == "quark of another model"
    quant = SimpleNamespace(get_name=lambda: "quark" if online or other else method, is_prequantized=not online)
    model = _model("/nowhere", "Qwen3_5MoeForConditionalGeneration" if other else install.MODEL)
    assert _untouched(model, LOAD, None if method is None else quant)


def test_a_server_that_asks_for_another_backend_is_untouched(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    server.attention_backend = "aiter"
    # A misspelt flag is no business of a server that does not ask for the plugin.
    monkeypatch.setenv("SGLANG_SPECVERIFY_MPT", "0")
    assert _untouched(_model("/nowhere"), LOAD, QUARK)


@pytest.mark.parametrize("flag", ["MTP=0", "DISABLE=1"])
def test_opted_out(flag: str, server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, value = flag.partition("=")
    monkeypatch.setenv(f"SGLANG_SPECVERIFY_{name}", value)
    assert _untouched(_model("/nowhere"), LOAD, QUARK)


def _without_mtp(directory: Path) -> Path:
    one = Written(Kind(), directory)
    write(directory, {name: tensor for name, tensor in one.tensors.items() if not name.startswith("mtp.")})
    return directory


def test_left_to_sglang_with_the_reason(
    server: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("sglang_specverify"), "propagate", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "bare").mkdir()
    cases = {
        "no/such-model is not on this machine yet": "no/such-model",
        "bare has no safetensors file": tmp_path / "bare",
        "hold no MTP tensors": _without_mtp(tmp_path / "without"),
    }
    for reason, path in cases.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert _untouched(_model(path), LOAD, QUARK)
            assert _untouched(_model(path), LOAD, QUARK)
        assert [record.getMessage().endswith(reason) for record in caplog.records] == [True], reason
        monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
        with pytest.raises(SpecverifyError, match=reason):
            install.wrapped(Stock())(_model(path), LOAD, QUARK)
        monkeypatch.delenv("SGLANG_SPECVERIFY_STRICT")


def test_a_snapshot_that_is_not_whole_is_left_to_sglang_to_fetch(
    server: SimpleNamespace, written: dict[str, Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(written["mixed"].directory, tmp_path / "snapshot")
    (tmp_path / "snapshot" / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(SpecverifyError, match="names files that are not there"):
        install.wrapped(Stock())(_model(tmp_path / "snapshot"), LOAD, QUARK)
    monkeypatch.setattr(install, "local_directory", lambda *_: tmp_path / "snapshot")
    assert _untouched(_model("some/model"), LOAD, QUARK)


def test_dummy_weights_have_no_types(server: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    dummy = SimpleNamespace(load_format=SimpleNamespace(value="dummy"), download_dir=None)
    assert _untouched(_model(tmp_path), dummy, QUARK)


def test_a_contradictory_checkpoint_stops_the_server_before_a_model_is_built(
    server: SimpleNamespace, written: dict[str, Written]
) -> None:
    stock = Stock()
    with pytest.raises(SpecverifyError, match=r"mtp\.layers\.0\.mlp\.experts is contradictory"):
        install.wrapped(stock)(_model(written["a few experts excluded"].directory), LOAD, QUARK)
    assert stock.calls == []


def test_the_patch_is_made_once_and_where_the_function_was_imported_to(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, package = Stock(), SimpleNamespace()
    package.loader = SimpleNamespace(_initialize_model=stock)
    holder, other = SimpleNamespace(_initialize_model=stock), SimpleNamespace(_initialize_model=None)
    for name, module in (
        ("model_loader", package),
        ("model_loader.loader", package.loader),
        ("model_loader.expert_pack_loader", holder),
        ("weight_cache.ipc_loader", other),
    ):
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    before = set(sys.modules)
    install.install()
    first = package.loader._initialize_model
    install.install()
    assert first is not stock and package.loader._initialize_model is first is holder._initialize_model
    assert other._initialize_model is None
    # Lazy: what the fix is made of is imported when such a model is loaded.
    assert not {name for name in set(sys.modules) - before if name.startswith("sglang.")}
