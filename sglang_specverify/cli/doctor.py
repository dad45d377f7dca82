"""`specverify doctor`: what is installed, what is in the way, and the way out of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_specverify import __version__, flags, upstream
from sglang_specverify.door.resolution import check_plugin_filter
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import NO_GPU, Hardware, detect
from sglang_specverify.routing import (
    PLUGIN,
    ROUTES,
    LayerFacts,
    LayerKind,
    Mode,
    ModelFacts,
    ServerFacts,
    choose_base,
    decide,
    require,
)

_GROUP = "sglang.srt.plugins"
_ENTRY = "sglang_specverify.plugin:register"
_DISTRIBUTIONS = ("torch", "triton", "sglang", "sglang-kernel")
_MODULES = ("sgl_kernel", "aiter", "flash_attn")
_REINSTALL = "install sglang-specverify into this environment again: pip install --force-reinstall --no-deps sglang-specverify"


@dataclass(frozen=True)
class Facts:
    """What `doctor` looks at, gathered once so that the checks are pure.

    `entry_points` holds (group, name, value, distribution) of every entry of that group, and of ours in others.
    """

    python: str = "3.11.0"
    versions: Mapping[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    hardware: Hardware = NO_GPU
    hardware_problem: str = ""
    entry_points: tuple[tuple[str, str, str, str], ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One line: `status` is "ok", "warn" or "FAIL"; the last two carry a remedy."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def gather() -> Facts:
    """Look at this environment. Imports torch, and neither SGLang nor a kernel package."""
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    hardware, problem = NO_GPU, ""
    try:
        hardware = detect()
    except SpecverifyError as error:
        problem = error.what
    # The first as SGLang asks for them; the second finds ours in a group where SGLang does not look.
    found = list(importlib.metadata.entry_points(group=_GROUP))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        own = importlib.metadata.distribution("sglang-specverify").entry_points
        found += [entry for entry in own if entry.group != _GROUP and entry.value == _ENTRY]
    entries = tuple((entry.group, entry.name, entry.value, entry.dist.name if entry.dist else "?") for entry in found)
    modules = frozenset(name for name in _MODULES if find_spec(name) is not None)
    return Facts(platform.python_version(), versions, modules, hardware, problem, entries, dict(os.environ))


def checks(facts: Facts) -> list[Check]:
    """Every finding about `facts`, in reading order."""
    return [
        *_versions(facts),
        *_hardware(facts),
        *_kernel_packages(facts),
        _entry_point(facts),
        _plugin_filter(facts),
        *_serving(facts),
    ]


def _versions(facts: Facts) -> Iterator[Check]:
    minor = tuple(int(part) for part in facts.python.split(".")[:2])
    if minor in ((3, 11), (3, 12)):
        yield Check("python", "ok", facts.python)
    else:
        yield Check("python", "FAIL", f"{facts.python}; supported: 3.11 and 3.12", "make an environment with Python 3.11 or 3.12")
    yield Check("sglang-specverify", "ok", __version__)
    version = facts.versions.get("sglang")
    try:
        upstream.check_version(version)
        yield Check("sglang", "ok", f"{version}; supported: {upstream.RANGE}")
    except SpecverifyError as error:
        yield Check("sglang", "FAIL", error.what, error.remedy)
    for name in ("torch", "triton"):
        if name in facts.versions:
            yield Check(name, "ok", facts.versions[name])
        else:
            yield Check(
                name, "FAIL", "not installed, and SGLang does not start without it", f"install the {name} SGLang asks for"
            )


def _hardware(facts: Facts) -> Iterator[Check]:
    machine = facts.hardware
    if facts.hardware_problem:
        yield Check("hardware", "FAIL", facts.hardware_problem, "repair or reinstall torch in this environment")
    elif machine.vendor == "other":
        yield Check("hardware", "FAIL", machine.name, "see that the driver answers (nvidia-smi or rocm-smi)")
    elif not machine.has_gpu:
        yield Check("hardware", "ok", "no GPU: the FP64 reference serves, for tests and demonstration")
    else:
        size = (
            f"{machine.count} × {machine.name}, {machine.memory_bytes / 2**30:.0f} GiB, {machine.multiprocessors} multiprocessors"
        )
        if machine.family == "other":
            remedy = "the triton base serves; compare with SGLang's own choice before relying on it"
            yield Check("hardware", "warn", f"{machine.arch}, {size}: not one this plugin was made for", remedy)
        else:
            yield Check("hardware", "ok", f"{machine.display}, {size}")


def _kernel_packages(facts: Facts) -> Iterator[Check]:
    nvidia, amd = facts.hardware.vendor == "nvidia", facts.hardware.vendor == "amd"
    if "sgl_kernel" not in facts.modules:
        remedy = (
            "install sglang-kernel as SGLang's own set-up does"
            if facts.hardware.has_gpu
            else "run scripts/setup of this repository, which puts the stand-in for CPUs on the path"
        )
        yield Check("sgl_kernel", "FAIL", "not importable, and SGLang does not start without it", remedy)
    elif nvidia and "sglang-kernel" not in facts.versions:
        remedy = "if SGLang fails in sgl_kernel, remove what else provides that name and install sglang-kernel"
        yield Check("sgl_kernel", "warn", "importable, but the distribution sglang-kernel is not installed", remedy)
    else:
        yield Check("sgl_kernel", "ok", facts.versions.get("sglang-kernel", "importable"))
    if "aiter" in facts.modules:
        yield Check("aiter", "ok", "importable")
    elif amd:
        yield Check("aiter", "warn", "not installed: triton is the base here", "install aiter for its kernels")
    else:
        yield Check("aiter", "ok", "not installed, and not needed here")
    present = "importable" if "flash_attn" in facts.modules else "not installed, and not needed: SGLang brings its own"
    yield Check("flash-attn", "ok", present)


def _entry_point(facts: Facts) -> Check:
    ours = [entry for entry in facts.entry_points if entry[0] == _GROUP and entry[1] == PLUGIN]
    elsewhere = [entry for entry in facts.entry_points if entry[0] != _GROUP and entry[2] == _ENTRY]
    if len(ours) == 1 and ours[0][2] == _ENTRY and not elsewhere:
        return Check("entry point", "ok", f"{PLUGIN} in group {_GROUP}, once")
    if len(ours) > 1:
        owners = ", ".join(sorted(entry[3] for entry in ours))
        return Check(
            "entry point", "FAIL", f"{PLUGIN} is there {len(ours)} times, from {owners}", "uninstall all but one of them"
        )
    if elsewhere:
        groups = ", ".join(sorted({entry[0] for entry in elsewhere}))
        return Check("entry point", "FAIL", f"registered in group {groups}; SGLang looks in {_GROUP}", _REINSTALL)
    if ours:
        return Check("entry point", "FAIL", f"{PLUGIN} points at {ours[0][2]}, not at {_ENTRY}", _REINSTALL)
    return Check("entry point", "FAIL", f"no {PLUGIN} in group {_GROUP}: SGLang would not load the plugin", _REINSTALL)


def _plugin_filter(facts: Facts) -> Check:
    value = facts.environ.get("SGLANG_PLUGINS", "")
    try:
        check_plugin_filter(value)
    except SpecverifyError as error:
        return Check("SGLANG_PLUGINS", "FAIL", error.what, error.remedy)
    return Check("SGLANG_PLUGINS", "ok", f"{value}: lets the plugin in" if value else "not set: every plugin loads")


def _serving(facts: Facts) -> Iterator[Check]:
    try:
        current = flags.read(facts.environ)
    except SpecverifyError as error:
        yield Check("flags", "FAIL", error.what, error.remedy)
        return
    if current.disable:
        remedy = "unset SGLANG_SPECVERIFY_DISABLE to switch it on"
        yield Check("flags", "warn", "SGLANG_SPECVERIFY_DISABLE=1: the plugin is switched off", remedy)
    else:
        names = [flag.name for flag in flags.FLAGS if flag.name in facts.environ]
        yield Check("flags", "ok", f"set: {', '.join(names)}" if names else "all at their defaults")
    try:
        base = choose_base(facts.hardware, ModelFacts(), ServerFacts(base=""), current, facts.modules)
    except SpecverifyError as error:
        yield Check("base", "FAIL", error.what, error.remedy)
        return
    yield Check("base", "ok", f"{base.base}: {base.reason}")
    yield Check("kernels", "ok", f"of this version: {', '.join(route.name for route in ROUTES)}")
    server = ServerFacts(base=base.base, cuda_graph=facts.hardware.has_gpu)
    layer = LayerFacts(LayerKind.FULL, 8, 8, 128, 128)
    for mode in Mode:
        decision = decide(facts.hardware, server, layer, mode, current)
        try:
            require(decision, current)
        except SpecverifyError as error:
            yield Check(mode.value, "FAIL", error.what, error.remedy)
            continue
        if decision.served or not decision.claimed:
            yield Check(mode.value, "ok", f"{decision.kernel}: {decision.reason}")
        else:
            yield Check(mode.value, "warn", decision.reason, "`specverify explain` says what each kernel would need")


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False) -> None:
    """Check versions, hardware, entry point, flags and kernels; every trouble comes with its remedy. Exit code 1 on FAIL."""
    found = checks(gather())
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in found], indent=2))
    else:
        _render(found, Console())
    if any(check.status == "FAIL" for check in found):
        raise typer.Exit(1)


def _render(found: list[Check], console: Console) -> None:
    styles = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in found:
        detail = Text(check.detail)
        if check.remedy:
            detail.append(f"\nremedy: {check.remedy}", style="cyan")
        table.add_row(Text(check.status, style=styles[check.status]), Text(check.name), detail)
    console.print(table)
    failed, warned = (sum(check.status == status for check in found) for status in ("FAIL", "warn"))
    console.print(f"{len(found)} checks, {warned} warn, {failed} FAIL")
