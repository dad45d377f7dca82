"""What a described server would run: base, routes and reasons, computed without SGLang and without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_specverify.cli.sparse_mla import SparseExplanation, explain_sparse
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import Flags, switch
from sglang_specverify.hardware import NO_GPU, Hardware
from sglang_specverify.routing import (
    PLUGIN,
    STOCK,
    BaseDecision,
    Decision,
    LayerKind,
    Mode,
    ServerFacts,
    check_request,
    choose_base,
    decide,
    require,
)
from sglang_specverify.routing.facts import DRAFT_MODELS
from sglang_specverify.routing.launch import check_launch
from sglang_specverify.routing.model import Description, LayerGroup, describe, read_config
from sglang_specverify.routing.model_rules import check_model
from sglang_specverify.routing.options import ServerLine, parse
from sglang_specverify.routing.server import server_facts

_DRAFT_MODES = (Mode.DRAFT_DECODE, Mode.DRAFT_EXTEND)
#: The options that may name the plugin, the draft's last.
_OPTIONS = (
    "--attention-backend",
    "--prefill-attention-backend",
    "--decode-attention-backend",
    "--speculative-draft-attention-backend",
)


@dataclass(frozen=True)
class Row:
    """The decision for one kind of layer in one mode. `model` is "target" or "draft"."""

    mode: Mode
    model: str
    layers: LayerGroup
    decision: Decision


@dataclass(frozen=True)
class Explanation:
    """All that `specverify explain` says. `refused` is why such a server would not start, or empty; `sparse` is for models whose
    layers SGLang's dsv4 backend serves.
    """

    model: Description
    hardware: Hardware
    server: ServerFacts
    base: BaseDecision
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    refused: str
    sparse: SparseExplanation | None = None

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain values for JSON."""
        return {
            "architectures": list(self.model.architectures),
            "hardware": {"family": self.hardware.family, "arch": self.hardware.arch, "name": self.hardware.name},
            "server": _plain(self.server),
            "base": {"name": self.base.base, "reason": self.base.reason, "rejected": [_plain(r) for r in self.base.rejected]},
            "routes": [
                {
                    "mode": row.mode.value,
                    "model": row.model,
                    "layers": row.layers.count,
                    "layer": _plain(row.layers.facts),
                    "kernel": row.decision.kernel,
                    "reason": row.decision.reason,
                    "rejected": [_plain(r) for r in row.decision.rejected],
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
            "refused": self.refused,
            **({} if self.sparse is None else {"sparse_mla": self.sparse.as_dict()}),
        }


def explain(
    model: str | None, hardware: Hardware, arguments: Sequence[str], flags: Flags, installed: frozenset[str]
) -> Explanation:
    """Work out what a server would run.

    Args:
        model: a directory or config.json; None takes `--model-path` from `arguments`.
        hardware: where it would run; `--device cpu` among the arguments makes it no GPU.
        arguments: the server's, SGLang's own spelling.
        flags: the plugin's.
        installed: of the optional kernel packages, those to count as present.

    Raises:
        SpecverifyError: no model, an unreadable one, a bad server line, or a base that cannot be chosen.
    """
    line = parse(arguments)
    path = model or line.values.get("--model-path")
    if path is None:
        raise SpecverifyError("no model was named", "add --model DIR, or --model-path DIR among the server's arguments")
    if line.values.get("--device") == "cpu":
        hardware = NO_GPU
    config = read_config(path)
    target = _describe(config, line)
    asked = _asked(line)
    if PLUGIN in asked:
        check_launch(line)
    check_request(*asked, mode=line.mode, speculation=line.algorithm is not None)
    draft_config = _draft_config(line)
    server = server_facts(line, target, "", hardware.has_gpu, draft_config)
    base = choose_base(hardware, target.facts, server, flags, installed)
    server = dataclasses.replace(server, base=base.base, page_size=_page_size(server, base.base, hardware, target))
    draft, draft_note = _draft(line, server.algorithm, target, draft_config)
    sparse = explain_sparse(config, line, hardware, flags)
    # Such a model's attention never reaches a backend that the line names.
    rows = () if sparse else tuple(_rows(line, asked, hardware, server, flags, target, draft))
    notes = (*_line_notes(line, server), *target.notes, *draft_note)
    refused = _refused_model(line, asked, target, draft) or (sparse.refused if sparse else _refused(rows, flags))
    return Explanation(target, hardware, server, base, rows, notes, refused, sparse)


def _describe(config: dict[str, Any], line: ServerLine) -> Description:
    return describe(config, line.attention_ranks, minicpm_dense=switch("SGLANG_MINICPM_FORCE_DENSE"))


def _asked(line: ServerLine) -> tuple[str | None, str | None, str | None, str | None]:
    """The four names; a line that names no attention backend is read as `specverify serve` would start it."""
    attention, prefill, decode, draft = line.backends
    return (attention or (None if PLUGIN in line.backends else PLUGIN), prefill, decode, draft)


def _refused_model(line: ServerLine, asked: tuple[str | None, ...], target: Description, draft: Description) -> str:
    """Why SGLang would not let the plugin serve the target or the draft, whatever the base; empty where it would."""
    # A model of the dsv4 backend needs no name on the line.
    names = line.backends if target.sparse == "dsv4" else asked
    options = [option for option, name in zip(_OPTIONS, names, strict=True) if name == PLUGIN]
    own = [option for option in options if option == _OPTIONS[3]]
    path = line.values.get("--speculative-draft-model-path")
    try:
        prefill, _ = _backend_of(Mode.PREFILL, line, names)
        check_model(target.architectures, target.sparse, [option for option in options if option not in own], prefill=prefill)
        drafts = line.algorithm in DRAFT_MODELS and any(_backend_of(mode, line, names)[0] for mode in _DRAFT_MODES)
        if drafts and (path is None or Path(path).exists()):
            check_model(draft.architectures, draft.sparse, own or options)
    except SpecverifyError as error:
        return f"{error.what}; {error.remedy}"
    return ""


def _page_size(server: ServerFacts, base: str, hardware: Hardware, model: Description) -> int:
    blackwell = hardware.family in ("sm100", "sm103", "sm107")
    # SGLang sets FA4's page size itself there, except for trees, which need pages of 1.
    return 128 if base == "fa4" and blackwell and server.topk <= 1 and not model.facts.is_mla else server.page_size


def _draft_config(line: ServerLine) -> dict[str, Any] | None:
    path = line.values.get("--speculative-draft-model-path")
    return read_config(path) if line.algorithm is not None and path is not None and Path(path).exists() else None


def _draft(
    line: ServerLine, algorithm: str | None, target: Description, config: dict[str, Any] | None
) -> tuple[Description, tuple[str, ...]]:
    if algorithm not in DRAFT_MODELS:
        return target, ()
    if config is not None:
        return _describe(config, line), ()
    attending = [group for group in target.groups if group.facts.kind is not LayerKind.LINEAR]
    whole = [group for group in attending if group.facts.window < 0] or attending
    note = "the draft's config.json is not at hand: its rows show an attention layer of the target's kind"
    return dataclasses.replace(target, groups=tuple(dataclasses.replace(group, count=1) for group in whole[:1])), (note,)


def _rows(
    line: ServerLine,
    asked: tuple[str | None, ...],
    hardware: Hardware,
    server: ServerFacts,
    flags: Flags,
    target: Description,
    draft: Description,
) -> Iterator[Row]:
    for mode in _modes(server.algorithm):
        ours, backend = _backend_of(mode, line, asked)
        model, name = (draft, "draft") if mode in _DRAFT_MODES else (target, "target")
        for group in model.groups:
            if ours:
                decision = decide(hardware, server, group.facts, mode, flags)
            else:
                decision = Decision(STOCK, f"the server line gives this mode to {backend}, not to the plugin", (), False)
            yield Row(mode, name, group, decision)


def _modes(algorithm: str | None) -> tuple[Mode, ...]:
    if algorithm is None:
        return (Mode.PREFILL, Mode.DECODE)
    if algorithm in DRAFT_MODELS:
        return (Mode.TARGET_VERIFY, Mode.DRAFT_DECODE, Mode.DRAFT_EXTEND, Mode.PREFILL, Mode.DECODE)
    return (Mode.TARGET_VERIFY, Mode.PREFILL, Mode.DECODE)


def _backend_of(mode: Mode, line: ServerLine, asked: tuple[str | None, ...]) -> tuple[bool, str]:
    """Whether the plugin is what runs `mode`, and the name of what does."""
    attention, prefill, decode, draft = asked
    verifies = (prefill if line.mode == "prefill" else decode) or attention
    name = {
        Mode.PREFILL: prefill or attention,
        Mode.DECODE: decode or attention,
        Mode.TARGET_VERIFY: verifies,
        Mode.DRAFT_DECODE: draft or decode or attention,
        Mode.DRAFT_EXTEND: draft or verifies,
    }[mode]
    return name == PLUGIN, name or "SGLang's own choice"


def _line_notes(line: ServerLine, server: ServerFacts) -> Iterator[str]:
    if PLUGIN not in line.backends and line.backends[0] is None:
        yield f"the line names no attention backend: explained with --attention-backend {PLUGIN}"
    if line.algorithm is None:
        yield "no --speculative-algorithm: nothing is verified and nothing drafted"
    if server.page_size != line.integers.get("--page-size", 1):
        yield f"SGLang sets page size {server.page_size} for {server.base} here"
    if "--config" in line.values:
        yield "--config is not read: name its options here too"


def _refused(rows: tuple[Row, ...], flags: Flags) -> str:
    for row in rows:
        try:
            require(row.decision, flags)
        except SpecverifyError as error:
            return f"{row.mode.value}, {row.layers.facts.kind.value}: {error.what}"
    return ""


def _plain(facts: Any) -> dict[str, Any]:
    found = dataclasses.asdict(facts)
    for key, value in found.items():
        if isinstance(value, frozenset):
            found[key] = sorted(value)
        elif isinstance(value, LayerKind):
            found[key] = value.value
    return found
