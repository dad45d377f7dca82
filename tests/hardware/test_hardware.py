"""Names, families and detection, with torch and SGLang's platform facts replaced by plain objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_specverify import hardware
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import BASES
from sglang_specverify.hardware import FAMILIES, NO_GPU, Hardware, detect, from_name, from_sglang_platform, names


@pytest.fixture(autouse=True)
def _fresh_detection() -> Iterator[None]:
    detect.cache_clear()
    yield
    detect.cache_clear()


@pytest.mark.parametrize(
    ("name", "vendor", "arch", "family"),
    [
        ("sm_90", "nvidia", "sm_90", "sm90"),
        ("SM90", "nvidia", "sm_90", "sm90"),
        ("sm_90a", "nvidia", "sm_90", "sm90"),
        ("H200", "nvidia", "sm_90", "sm90"),
        ("gb200", "nvidia", "sm_100", "sm100"),
        ("sm_103a", "nvidia", "sm_103", "sm103"),
        ("B300", "nvidia", "sm_103", "sm103"),
        ("sm107", "nvidia", "sm_107", "sm107"),
        ("A100", "nvidia", "sm_80", "other"),
        ("sm_120", "nvidia", "sm_120", "other"),
        ("gfx942", "amd", "gfx942", "gfx942"),
        ("MI300X", "amd", "gfx942", "gfx942"),
        ("mi355x", "amd", "gfx950", "gfx95x"),
        ("gfx90a", "amd", "gfx90a", "other"),
        ("none", "none", "none", "none"),
        ("CPU", "none", "none", "none"),
    ],
)
def test_names(name: str, vendor: str, arch: str, family: str) -> None:
    found = from_name(name)
    assert (found.vendor, found.arch, found.family) == (vendor, arch, family)
    assert found.has_gpu == (vendor != "none")


def test_every_listed_name_means_something() -> None:
    assert len(set(names())) == len(names())
    for name in names():
        assert from_name(name).family in FAMILIES


@pytest.mark.parametrize("name", ["", "sm_9", "sm_900", "H2000", "gfx95", "tpu"])
def test_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(SpecverifyError) as caught:
        from_name(name)
    assert repr(name) in caught.value.what
    for known in ("sm_90", "H200", "gfx950", "none", "auto"):
        assert known in caught.value.remedy


def test_facts_name_only_known_bases() -> None:
    for family, facts in FAMILIES.items():
        assert set(facts.preference) <= set(facts.possible) <= set(BASES), family
        assert "triton" in facts.preference, family


def test_fa3_is_possible_on_ampere_and_ada_but_not_preferred() -> None:
    for name in ("A100", "L40S"):
        assert from_name(name).possible_bases == ("fa3", "triton")
        assert from_name(name).facts.preference == ("triton",)
    assert "fa3" not in from_name("sm_120").possible_bases


def _torch(**changes: Any) -> ModuleType:
    """A stand-in for torch with one H200, changed where a test says so."""
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=150 << 30, multi_processor_count=132, gcnArchName="?"
    )
    facts: dict[str, Any] = {"available": True, "count": 8, "properties": lambda _: properties, "hip": None, "cuda": "13.0"}
    facts.update(changes)
    module = ModuleType("torch")
    module.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: facts["available"],
        device_count=lambda: facts["count"],
        get_device_properties=facts["properties"],
    )
    module.version = SimpleNamespace(hip=facts["hip"], cuda=facts["cuda"])  # type: ignore[attr-defined]
    return module


def test_detects_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _torch())
    assert detect() == Hardware("nvidia", "sm_90", "NVIDIA H200", 8, 150 << 30, 132)


def test_detects_amd_without_the_features_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="MI355X", gcnArchName="gfx950:sramecc+:xnack-", total_memory=1, multi_processor_count=256)
    monkeypatch.setitem(sys.modules, "torch", _torch(properties=lambda _: properties, hip="7.0", cuda=None))
    assert (detect().vendor, detect().arch, detect().family) == ("amd", "gfx950", "gfx95x")


def test_detects_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _torch(available=False))
    assert detect() == NO_GPU


def test_without_torch_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert detect() == NO_GPU


@pytest.mark.parametrize("text", ["raise ImportError('libcudart.so')", "raise OSError('libcudart.so')", "import missing_part"])
def test_a_torch_that_does_not_import_is_not_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "torch.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecverifyError, match=r"torch does not import: .*(libcudart|missing_part)"):
        detect()


def test_a_gpu_that_does_not_answer_is_not_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setitem(sys.modules, "torch", _torch(properties=broken))
    assert detect().vendor == "other"
    assert detect().has_gpu


def test_detection_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _torch())
    first = detect()
    monkeypatch.setitem(sys.modules, "torch", _torch(available=False))
    assert detect() is first
    assert from_name("auto") is first


def _platform(**facts: Any) -> SimpleNamespace:
    flags = ("cuda", "hip", "npu", "xpu", "musa", "mps", "sm90", "sm100", "sm110", "sm120")
    return SimpleNamespace(**{f"is_{flag}": False for flag in flags}, **{"device_sm": 0, **facts})


@pytest.mark.parametrize(
    ("facts", "arch", "family"),
    [
        ({}, "none", "none"),
        ({"is_sm90": True}, "sm_90", "sm90"),
        ({"is_sm100": True}, "sm_100", "sm100"),
        ({"is_sm100": True, "device_sm": 103}, "sm_103", "sm103"),
        ({"is_sm100": True, "device_sm": 107}, "sm_107", "sm107"),
        # The number is this machine's own, and the override says another.
        ({"is_sm100": True, "device_sm": 90}, "sm_100", "sm100"),
        ({"is_sm120": True, "device_sm": 121}, "sm_121", "other"),
        ({"is_hip": True, "device_sm": 94}, "gfx942", "gfx942"),
        ({"is_hip": True, "device_sm": 95}, "gfx950", "gfx95x"),
        ({"is_hip": True, "device_sm": 90}, "unknown", "other"),
        ({"is_cuda": True, "device_sm": 89}, "sm_89", "other"),
        ({"is_cuda": True}, "unknown", "other"),
        ({"is_npu": True}, "unknown", "other"),
    ],
)
def test_platform_facts(facts: dict[str, Any], arch: str, family: str) -> None:
    platform = SimpleNamespace(**{**vars(_platform()), **facts})
    found = from_sglang_platform(platform)
    assert (found.arch, found.family) == (arch, family)
    assert from_sglang_platform(platform, "cuda") == found
    assert from_sglang_platform(platform, "cpu") == NO_GPU


def test_other_hardware_is_called_by_its_architecture() -> None:
    assert from_name("sm_120").display == "sm_120"
    assert from_name("H200").display == "SM90"
    assert hardware.NO_GPU.display == "no GPU"
