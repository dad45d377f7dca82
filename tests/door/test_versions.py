"""An SGLang out of the supported range: nothing breaks until the plugin is asked for, and then the range is named."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from sglang_specverify import upstream
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.plugin import register
from tests.door.resolve import PLUGIN, arguments, resolve

pytestmark = pytest.mark.usefixtures("unregistered")


@pytest.mark.parametrize("version", ["0.5.21", "0.5.24", "0.6.0", "0.5.23.post1", "0.5.23rc1", None])
def test_asking_names_the_range(version: str | None, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "installed_version", lambda: version)
    register()
    with pytest.raises(SpecverifyError, match=r"this plugin supports 0\.5\.22 and 0\.5\.23") as raised:
        resolve("none", arguments("none", models, "qwen3", PLUGIN))
    assert (version or "not installed") in raised.value.what
    assert "install sglang==0.5.23" in raised.value.remedy


def test_not_asking_is_no_error(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "installed_version", lambda: "0.6.0")
    register()
    line = arguments("none", models, "qwen3", "--attention-backend triton")
    assert resolve("none", line)[1].attention_backend == "triton"


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23", "0.5.23+cu130"])
def test_supported(version: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "installed_version", lambda: version)
    register()
    assert resolve("none", arguments("none", models, "qwen3", PLUGIN))[1].attention_backend == "triton"


def test_an_unsupported_version_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import scheduler  # noqa: F401  its presence is what makes register() patch

    from sglang_specverify.door import scheduler as door

    called: list[str] = []
    monkeypatch.setattr(door, "install", lambda: called.append("install"))
    monkeypatch.setattr(upstream, "installed_version", lambda: "0.6.0")
    register()
    assert called == []
    monkeypatch.setattr(upstream, "installed_version", lambda: "0.5.23")
    register._done = False  # type: ignore[attr-defined]
    register()
    register()
    assert called == ["install"], "once, however often it is called"


def test_a_release_without_the_hooks_gets_the_message_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to 0.5.18 SGLang has neither the choices nor the resolution steps as modules; its own parser then refuses the name."""
    monkeypatch.setattr(upstream, "installed_version", lambda: "0.5.18")
    from sglang.srt import arg_groups

    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.choices", None)
    monkeypatch.delattr(arg_groups, "choices", raising=False)
    with caplog.at_level(logging.ERROR):
        register()
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
        "specverify: error: SGLang 0.5.18 is not supported: this plugin supports 0.5.22 and 0.5.23"
    ]
    monkeypatch.setattr(upstream, "installed_version", lambda: "0.5.23")
    with pytest.raises(ImportError):
        register()
