"""The stand-in must never hide real kernels."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from tests.cpu_standin.conftest import load

NAME = "specverify_cpu_standin_refused"


def test_refuses_where_a_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ImportError, match="machine with a GPU"):
        load(NAME)


def test_refuses_a_rocm_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    with pytest.raises(ImportError, match="ROCm"):
        load(NAME)


@pytest.mark.parametrize("distribution", ["sglang-kernel", "sgl-kernel"])
def test_refuses_beside_the_real_distribution(monkeypatch: pytest.MonkeyPatch, distribution: str) -> None:
    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.4.10" if name == distribution else known(name))
    with pytest.raises(ImportError, match=f"installed distribution {distribution}"):
        load(NAME)


def test_cuda_operation_says_so(kernels: object) -> None:
    with pytest.raises(NotImplementedError, match="CPU stand-in"):
        kernels.merge_state_v2()  # type: ignore[attr-defined]
