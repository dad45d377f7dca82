"""How the MTP part of a checkpoint is to be built: one type for each module that SGLang builds, told by the files.

The files decide. config.json is read for what it adds, and where it says otherwise the difference is noted. A checkpoint whose
experts (or projections that SGLang fuses) do not share one type, or whose exclude list names some of the experts alone, is
refused with the tensors' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp.config import CheckpointConfig, read_config, type_of_spec
from sglang_specverify.mtp.headers import stored_tensors
from sglang_specverify.mtp.names import built_name, canonical, is_quantizable
from sglang_specverify.mtp.witness import StoredModule, modules_of

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_REMEDY = "quantise all of them or none, and list the same in `exclude`; SGLANG_SPECVERIFY_MTP=0 leaves the checkpoint to SGLang"


@dataclass(frozen=True)
class Built:
    """One module as SGLang builds it, `name` in SGLang's spelling, from one or more `stored` ones.

    `type` is theirs; where they differ, all joined by "+", which for a checkpoint of Quark's happens to plain types alone.
    `note` says where config.json disagrees with the files; "" where it does not.
    """

    name: str
    type: str
    stored: tuple[StoredModule, ...]
    note: str = ""

    @property
    def is_plain(self) -> bool:
        return self.stored[0].is_plain

    @property
    def quantizable(self) -> bool:
        return is_quantizable(self.name)


@dataclass(frozen=True)
class Plan:
    """The MTP part of one checkpoint, `built` ordered by name; empty where it has none."""

    directory: Path
    config: CheckpointConfig
    built: tuple[Built, ...]

    @property
    def stored(self) -> tuple[StoredModule, ...]:
        return tuple(module for built in self.built for module in built.stored)

    @property
    def kind(self) -> str:
        """For people: which of the modules that can be are quantised, and whether there are experts."""
        able = [built for built in self.built if built.quantizable]
        if not able:
            return "no MTP" if not self.built else "MTP without projections"
        plain = sum(built.is_plain for built in able)
        size = "all plain" if plain == len(able) else "mixed" if plain else "all quantised"
        moe = any(built.name.endswith(".experts") for built in able)
        return f"{size}, {'routed experts' if moe else 'dense'}"

    @property
    def all_plain(self) -> bool:
        return all(built.is_plain for built in self.built)


def read_plan(directory: str | Path) -> Plan:
    """Read config.json and the headers of the safetensors files in `directory`; no weight is read.

    Raises:
        SpecverifyError: the checkpoint cannot be read; or, where it is Quark's, its MTP part is contradictory.
    """
    path = Path(directory)
    config = read_config(path)
    depth = config.num_hidden_layers
    modules = modules_of(stored_tensors(path, lambda name: canonical(name, depth) is not None), depth)
    groups: dict[str, list[StoredModule]] = {}
    for module in modules:
        groups.setdefault(built_name(module.canonical), []).append(module)
    return Plan(path, config, tuple(_build(name, tuple(group), config) for name, group in sorted(groups.items())))


def _build(name: str, stored: tuple[StoredModule, ...], config: CheckpointConfig) -> Built:
    if not config.is_quark:
        return Built(name, _types(stored), stored)
    problems = [module.problem for module in stored if module.problem]
    if problems:
        raise SpecverifyError(f"{name} is contradictory: {_some(problems)}", _REMEDY)
    _refuse_several_types(name, stored)
    kind = _types(stored)
    if not is_quantizable(name):
        if not stored[0].is_plain:
            what = f"{name} is stored as {kind}, and SGLang builds it unquantised: {_tensors(stored)}"
            raise SpecverifyError(what, "keep this module out of the quantisation")
        return Built(name, kind, stored)
    if name.endswith(".experts"):
        _refuse_missing_experts(name, stored, config)
        _refuse_some_excluded(name, stored, config)
    return Built(name, kind, stored, _disagreement(stored, config))


def _refuse_several_types(name: str, stored: tuple[StoredModule, ...]) -> None:
    """SGLang builds one module from all of `stored`, so in one type with one kind of scale; plain types it converts."""
    groups: dict[tuple[str, str], list[StoredModule]] = {}
    for module in stored:
        groups.setdefault(("unquantised", "") if module.is_plain else (module.type, module.granularity), []).append(module)
    if len(groups) > 1:
        # The rarer type first: that is where the mistake is likely to be.
        order = sorted(groups.items(), key=lambda item: len(item[1]))
        said = "; ".join(f"{len(members)} as {' '.join(filter(None, key))}: {_tensors(members)}" for key, members in order)
        raise SpecverifyError(f"{name} is one module and holds one type, but is stored in {len(groups)}: {said}", _REMEDY)


def _refuse_missing_experts(name: str, stored: tuple[StoredModule, ...], config: CheckpointConfig) -> None:
    if not config.num_experts:
        return
    tails = {module.canonical.removeprefix(f"{name}.") for module in stored}
    if not any(tail.partition(".")[0].isdigit() for tail in tails):
        return
    wanted = [f"{expert}.{projection}" for expert in range(config.num_experts) for projection in _PROJECTIONS]
    absent = [f"{name}.{tail}.weight" for tail in wanted if tail not in tails]
    fused = {f"{expert}.gate_up_proj" for expert in range(config.num_experts)} & tails
    if fused:
        what = f"{name} stores gate and up of each expert in one tensor, which SGLang's loader does not divide"
        raise SpecverifyError(f"{what}: {_tensors(stored)}", "store gate_proj and up_proj apart, or all experts in one tensor")
    if absent:
        raise SpecverifyError(f"{name} lacks {len(absent)} of {len(wanted)} weights: {_some(absent)}", "fetch the rest")


def _refuse_some_excluded(name: str, stored: tuple[StoredModule, ...], config: CheckpointConfig) -> None:
    tails = [f"{expert}.{projection}" for expert in range(config.num_experts) for projection in _PROJECTIONS]
    names = [f"{name}.{tail}" for tail in tails] or [module.canonical for module in stored]
    found = {module: config.excluded_by(module) for module in names}
    named = [module for module, entry in found.items() if entry is not None]
    if named and len(named) < len(names):
        by = sorted({str(found[module]) for module in named})
        rest = [module for module in names if found[module] is None]
        raise SpecverifyError(
            f"{name} is contradictory: the exclude list of config.json names {len(named)} of its {len(names)} weights "
            f"({_some(named)}; by {_some(by)}) and not the others ({_some(rest)}); the files hold all as {stored[0].type}",
            _REMEDY,
        )


def _disagreement(stored: tuple[StoredModule, ...], config: CheckpointConfig) -> str:
    """Where config.json says another type than the files do."""
    first = stored[0]
    entries = [config.excluded_by(module.canonical) for module in stored]
    if any(entries) and not all(entries):
        left = [module.name for module, entry in zip(stored, entries, strict=True) if entry is None]
        return f"config.json does not exclude {_some(left)} as it does the rest; the files decide: {first.type}"
    if entries[0] is not None:
        return "" if first.is_plain else f"config.json excludes it ({entries[0]!r}); the files decide: {first.type}"
    stated = type_of_spec(config.spec_of(first.canonical))[0]
    if stated == first.type or (not stated and first.is_plain):
        return ""
    return f"config.json says {stated or 'nothing'} and does not exclude it; the files decide: {first.type}"


def _types(stored: Sequence[StoredModule]) -> str:
    return "+".join(sorted({module.type for module in stored}))


def _tensors(modules: Sequence[StoredModule]) -> str:
    return _some([module.parts["weight"].what for module in modules])


def _some(names: Sequence[str], most: int = 4) -> str:
    """The first names and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
