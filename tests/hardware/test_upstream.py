"""The supported range of SGLang."""

from __future__ import annotations

import importlib.metadata

import pytest

from sglang_specverify import upstream
from sglang_specverify.errors import SpecverifyError


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23", "0.5.23+cu130", "0.5.22+rocm700"])
def test_supported(version: str) -> None:
    upstream.check_version(version)


@pytest.mark.parametrize("version", ["0.5.21", "0.5.24", "0.5.2", "0.5.23.post1", "0.5.23rc1", "0.5.230", "0.0.0.dev0", ""])
def test_refused_with_range_and_what_came(version: str) -> None:
    with pytest.raises(SpecverifyError) as caught:
        upstream.check_version(version)
    assert "0.5.22 and 0.5.23" in caught.value.what
    assert version in caught.value.what
    assert "sglang==0.5.23" in caught.value.remedy


def test_missing() -> None:
    with pytest.raises(SpecverifyError, match=r"not installed here; this plugin supports 0\.5\.22 and 0\.5\.23"):
        upstream.check_version(None)


def test_installed_version_asks_for_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"sglang": "9.9"}.__getitem__)
    assert upstream.installed_version() == "9.9"

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert upstream.installed_version() is None
