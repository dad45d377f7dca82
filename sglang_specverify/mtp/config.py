"""What a checkpoint's config.json says of its quantisation: the method, the exclude list, and the type of each module."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp.names import spellings
from sglang_specverify.mtp.section import Section

Spec = Mapping[str, Any]


class Excludes:
    """An exclude list of Quark: plain names, `re:` patterns (matched from the start, as SGLang does), and globs.

    An entry that names a parent names all that is below it.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(entries)
        self._plain = {entry for entry in self.entries if not entry.startswith("re:")}
        self._patterns = [(entry, _compiled(entry)) for entry in self.entries if entry.startswith("re:") or _is_glob(entry)]
        self._named = functools.cache(self._name)

    def find(self, module: str, num_hidden_layers: int) -> str | None:
        """The entry that names the canonical `module`, however it spells it; None where none does."""
        return next(filter(None, map(self._named, spellings(module, num_hidden_layers))), None)

    def _name(self, spelling: str) -> str | None:
        if spelling in self._plain:
            return spelling
        return next((entry for entry, pattern in self._patterns if pattern.match(spelling)), None)


def _is_glob(entry: str) -> bool:
    return any(character in entry for character in "*?[")


def _compiled(entry: str) -> re.Pattern[str]:
    if not entry.startswith("re:"):
        return re.compile(fnmatch.translate(entry))
    try:
        return re.compile(entry[3:])
    except re.error as error:
        raise SpecverifyError(
            f"the exclude list of config.json holds {entry!r}, which is no regular expression: {error}", "correct that entry"
        ) from None


@dataclass(frozen=True)
class CheckpointConfig:
    """What matters here of config.json. `quant` is the quantisation as it stands there, empty where there is none.

    `num_hidden_layers` is the language model's and `num_experts` its MTP layer's, 0 where it does not say.
    """

    architectures: tuple[str, ...] = ()
    num_hidden_layers: int = 0
    num_experts: int = 0
    quant: Spec = field(default_factory=dict)
    excludes: Excludes = field(default_factory=lambda: Excludes(()))

    @property
    def method(self) -> str:
        return str(self.quant.get("quant_method") or "none")

    @property
    def is_quark(self) -> bool:
        return self.method == "quark"

    def excluded_by(self, module: str) -> str | None:
        return self.excludes.find(module, self.num_hidden_layers)

    def spec_of(self, module: str) -> Spec:
        """The quantisation that the canonical `module` has unless it is excluded, in Quark's form; empty where none is given."""
        layers = self.quant.get("layer_quant_config") or {}
        for pattern, spec in layers.items():
            if any(fnmatch.fnmatch(name, pattern) for name in spellings(module, self.num_hidden_layers)):
                return spec or {}
        return self.quant.get("global_quant_config") or {}


def read_config(directory: Path) -> CheckpointConfig:
    """Read `directory`/config.json.

    Raises:
        SpecverifyError: it is absent, unreadable, or not an object; a key that is read holds a value of another type; or a
            pattern of its exclude list is no regular expression.
    """
    path = directory / "config.json"
    try:
        top = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecverifyError(f"{path} cannot be read: {error.strerror or error}", "name the directory of a checkpoint") from None
    except ValueError as error:
        raise SpecverifyError(f"{path} is no JSON: {error}", "fetch the file again") from None
    if not isinstance(top, dict):
        raise SpecverifyError(f"{path} holds no object", "fetch the file again")
    outer = Section(path, "", top)
    text = outer.section("text_config")
    # The order in which SGLang looks for it.
    declared = ((outer, "quantization_config"), (text, "quantization_config"), (outer, "compression_config"))
    sections = [section.section(key) for section, key in declared if section.values.get(key) is not None]
    quant = sections[0] if sections else Section(path, "", {})
    experts = (
        _language(outer, text, name).number_or_numbers(name) for name in ("mtp_num_experts", "num_experts", "num_local_experts")
    )
    # Other methods may mean other things by Quark's keys.
    is_quark = quant.string("quant_method") == "quark"
    if is_quark:
        _check_specs(quant)
    return CheckpointConfig(
        outer.strings("architectures"),
        max(0, _language(outer, text, "num_hidden_layers").number("num_hidden_layers")),
        max(0, next(filter(None, experts), 0)),
        quant.values,
        Excludes(quant.strings("exclude") if is_quark else ()),
    )


def _language(outer: Section, text: Section, key: str) -> Section:
    """Where a key of the language model stands."""
    return text if key in text.values else outer


def _check_specs(quant: Section) -> None:
    """Every key that `spec_of`, `type_of_spec` and `quark.spec_for` go by has its type."""
    layers = quant.section("layer_quant_config")
    for spec in (*map(layers.section, layers.values), quant.section("global_quant_config")):
        # A list is weights that are quantised twice, which no type here is.
        weight = spec.section_or_list("weight")
        if weight is not None:
            weight.string("dtype")
            weight.string("qscheme")
            weight.number("group_size")
            weight.sizes("block_size")


def type_of_spec(spec: Spec) -> tuple[str, str]:
    """Type and granularity of the weights that Quark's `spec` describes, in the words of `witness`; ("", "") for none."""
    weight = spec.get("weight")
    if not isinstance(weight, Mapping):
        return "", ""
    dtype, scheme = weight.get("dtype") or "", weight.get("qscheme") or ""
    if dtype == "fp4":
        return ("mxfp4" if weight.get("group_size") == 32 else "nvfp4"), "per_group"
    return ("fp8" if dtype.startswith("fp8") else dtype), scheme
