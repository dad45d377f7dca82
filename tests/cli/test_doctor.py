"""`specverify doctor` on described environments: each trouble found, named and given a remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sglang_specverify import upstream
from sglang_specverify.cli import doctor as module
from sglang_specverify.cli.doctor import Check, Facts, checks
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import Hardware
from tests.cli.conftest import Run

ENTRY = ("sglang.srt.plugins", "specverify", "sglang_specverify.plugin:register", "sglang-specverify")
CPU = Facts(
    python="3.11.9",
    versions={"torch": "2.13.0", "triton": "3.8.0", "sglang": "0.5.23"},
    modules=frozenset({"sgl_kernel"}),
    entry_points=(ENTRY,),
)
H200 = replace(
    CPU,
    versions={**CPU.versions, "sglang-kernel": "0.4.10"},
    hardware=Hardware("nvidia", "sm_90", "NVIDIA H200", 2, 141 << 30, 132),
)
RTX = replace(H200, hardware=Hardware("nvidia", "sm_120", "RTX", 1))
MI355X = replace(CPU, modules=frozenset({"sgl_kernel", "aiter"}), hardware=Hardware("amd", "gfx950", "MI355X", 8, 288 << 30, 256))


def found(facts: Facts, name: str) -> Check:
    (check,) = [check for check in checks(facts) if check.name == name]
    return check


def bad(facts: Facts, status: str = "FAIL") -> list[str]:
    return [check.name for check in checks(facts) if check.status == status]


def test_a_cpu_in_order() -> None:
    assert bad(CPU) == bad(CPU, "warn") == []
    assert "FP64 reference" in found(CPU, "hardware").detail
    assert found(CPU, "base").detail.startswith("triton")
    assert found(CPU, "target_verify").detail.startswith("reference")


def test_an_h200_in_order() -> None:
    assert bad(H200) == bad(H200, "warn") == []
    # The checks ask for a chain, which stays with FlashAttention; `explain` says it of a given server.
    assert "SGLANG_SPECVERIFY_CHAIN_KERNEL=fused" in found(H200, "target_verify").detail
    assert "prefix_gather, prefix_flash, prefix_tile, specialized, fused" in found(H200, "kernels").detail
    assert found(H200, "base").detail.startswith("fa3")
    assert found(H200, "hardware").detail == "SM90, 2 × NVIDIA H200, 141 GiB, 132 multiprocessors"


def test_an_mi355x_with_and_without_aiter() -> None:
    assert found(MI355X, "base").detail.startswith("aiter")
    assert bad(MI355X) == bad(MI355X, "warn") == []
    # The checks ask for a chain without aiter's unified attention; its draft steps stay with aiter.
    assert found(MI355X, "target_verify").detail.startswith("fused")
    assert "aiter keeps the steps of a chain" in found(MI355X, "draft_decode").detail
    without = replace(MI355X, modules=frozenset({"sgl_kernel"}))
    assert found(without, "aiter").status == "warn"
    assert found(without, "base").detail.startswith(
        "triton: aiter is preferred on gfx95x, but: the package aiter is not installed"
    )


def _without(name: str) -> dict[str, str]:
    return {key: value for key, value in CPU.versions.items() if key != name}


@pytest.mark.parametrize(
    ("facts", "name", "status", "detail"),
    [
        (replace(CPU, python="3.10.4"), "python", "FAIL", "3.10.4"),
        (replace(CPU, python="3.13.0"), "python", "FAIL", "3.13.0"),
        (replace(CPU, versions={**CPU.versions, "sglang": "0.5.30"}), "sglang", "FAIL", "0.5.30 is not supported"),
        (replace(CPU, versions=_without("sglang")), "sglang", "FAIL", "not installed here"),
        (replace(CPU, versions=_without("torch")), "torch", "FAIL", "not installed"),
        (replace(CPU, versions=_without("triton")), "triton", "FAIL", "not installed"),
        (replace(CPU, hardware_problem="torch does not import: libcudart"), "hardware", "FAIL", "libcudart"),
        (
            replace(CPU, hardware=Hardware("other", "unknown", "a GPU that torch cannot query", 1)),
            "hardware",
            "FAIL",
            "cannot query",
        ),
        (RTX, "hardware", "warn", "sm_120"),
        (replace(CPU, modules=frozenset()), "sgl_kernel", "FAIL", "not importable"),
        (replace(H200, modules=frozenset()), "sgl_kernel", "FAIL", "not importable"),
        (replace(H200, versions=CPU.versions), "sgl_kernel", "warn", "distribution sglang-kernel is not installed"),
        (replace(CPU, entry_points=()), "entry point", "FAIL", "would not load the plugin"),
        (
            replace(CPU, entry_points=(ENTRY, (*ENTRY[:3], "copy"))),
            "entry point",
            "FAIL",
            "2 times, from copy, sglang-specverify",
        ),
        (replace(CPU, entry_points=(("sglang.srt.platforms", *ENTRY[1:]),)), "entry point", "FAIL", "sglang.srt.platforms"),
        (replace(CPU, entry_points=(ENTRY, ("console_scripts", *ENTRY[1:]))), "entry point", "FAIL", "console_scripts"),
        (replace(CPU, entry_points=((*ENTRY[:2], "old.module:register", "x"),)), "entry point", "FAIL", "old.module"),
        (replace(CPU, entry_points=((ENTRY[0], "another", "a:b", "x"),)), "entry point", "FAIL", "no specverify"),
        (replace(CPU, environ={"SGLANG_PLUGINS": "another"}), "SGLANG_PLUGINS", "FAIL", "leaves the plugin specverify out"),
        (replace(CPU, environ={"SGLANG_PLUGINS": " "}), "SGLANG_PLUGINS", "FAIL", "SGLANG_PLUGINS=' ' leaves the plugin"),
        (replace(CPU, environ={"SGLANG_SPECVERIFY_BASE": "fa9"}), "flags", "FAIL", "not one of"),
        (replace(CPU, environ={"SGLANG_SPECVERIFY_BAES": "fa3"}), "flags", "FAIL", "not a flag"),
        (replace(CPU, environ={"SGLANG_SPECVERIFY_DISABLE": "1"}), "flags", "warn", "switched off"),
        (replace(CPU, environ={"SGLANG_SPECVERIFY_BASE": "fa3"}), "base", "FAIL", "fa3 needs a GPU"),
        (replace(RTX, environ={"SGLANG_SPECVERIFY_STRICT": "1"}), "target_verify", "FAIL", "SGLANG_SPECVERIFY_STRICT=1"),
    ],
    ids=str,
)
def test_trouble(facts: Facts, name: str, status: str, detail: str) -> None:
    check = found(facts, name)
    assert check.status == status
    assert detail in check.detail
    assert check.remedy
    healthy = H200 if facts.hardware.has_gpu else CPU
    if name != "target_verify":
        assert found(healthy, name).status == "ok"


def test_what_is_fine_is_not_reported_as_trouble() -> None:
    allowed = replace(CPU, environ={"SGLANG_PLUGINS": "another, specverify", "SGLANG_SPECVERIFY_TREE": "0"})
    assert bad(allowed) == bad(allowed, "warn") == []
    assert found(allowed, "flags").detail == "set: SGLANG_SPECVERIFY_TREE"
    strict = replace(CPU, environ={"SGLANG_SPECVERIFY_STRICT": "1"})
    assert bad(strict) == []
    others = replace(CPU, entry_points=(ENTRY, ("sglang.srt.plugins", "another", "a:b", "x")))
    assert bad(others) == []


def test_every_finding_has_a_detail_and_every_trouble_a_remedy() -> None:
    for facts in (CPU, H200, MI355X, Facts(), replace(H200, environ={"SGLANG_SPECVERIFY_STRICT": "1"})):
        for check in checks(facts):
            assert check.status in ("ok", "warn", "FAIL")
            assert check.detail
            assert bool(check.remedy) == (check.status != "ok"), check


@pytest.mark.parametrize(("facts", "code"), [(CPU, 0), (H200, 0), (Facts(), 1)], ids=["cpu", "h200", "empty"])
@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["table", "json"])
def test_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch, facts: Facts, code: int, arguments: tuple[str, ...]) -> None:
    monkeypatch.setattr(module, "gather", lambda: facts)
    outcome = run("doctor", *arguments)
    assert outcome.code == code
    expected = checks(facts)
    if arguments:
        assert [entry["status"] for entry in json.loads(outcome.out)] == [check.status for check in expected]
        assert set(json.loads(outcome.out)[0]) == {"name", "status", "detail", "remedy"}
    else:
        starts = [line.split()[0] for line in outcome.out.splitlines() if line.startswith(("ok ", "warn ", "FAIL "))]
        assert starts == [check.status for check in expected]
        assert outcome.out.count("remedy: ") == sum(bool(check.remedy) for check in expected)


def test_gathers_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise SpecverifyError("torch does not import: libcudart.so", "repair it")

    monkeypatch.setattr(module, "detect", broken)
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE", "0")
    facts = module.gather()
    assert facts.hardware_problem == "torch does not import: libcudart.so"
    assert facts.environ["SGLANG_SPECVERIFY_TREE"] == "0"
    assert facts.versions.get("sglang") == upstream.installed_version()
    assert all(len(entry) == 4 for entry in facts.entry_points)
