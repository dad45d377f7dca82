"""A JSON object of a configuration file whose keys are read with their types checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_specverify.errors import SpecverifyError


@dataclass(frozen=True)
class Section:
    """One object of the file `path`; `name` says which, with a dot at its end, and is "" for the outermost.

    A key that is absent or null reads as nothing: an empty section, tuple or string, or 0.

    Raises (every method):
        SpecverifyError: the key holds something of another type; names the file, the key, what came and what is allowed.
    """

    path: Path
    name: str
    values: Mapping[str, Any]

    def section(self, key: str) -> Section:
        found = self._read(key, "an object", lambda value: isinstance(value, dict))
        return Section(self.path, f"{self.name}{key}.", {} if found is None else found)

    def string(self, key: str) -> str:
        return str(self._read(key, "a string", lambda value: isinstance(value, str)) or "")

    def strings(self, key: str) -> tuple[str, ...]:
        return tuple(self._read(key, "a list of strings", lambda value: _is_list(value, lambda one: isinstance(one, str))) or ())

    def number(self, key: str) -> int:
        return int(self._read(key, "a whole number", _is_whole) or 0)

    def sizes(self, key: str) -> tuple[int, ...]:
        allowed = "a list of whole numbers from 1"
        return tuple(self._read(key, allowed, lambda value: _is_list(value, lambda one: _is_whole(one) and one > 0)) or ())

    def number_or_numbers(self, key: str) -> int:
        """A number for all layers; 0 for a list, which has one for each."""
        allowed = "a whole number, or a list of them"
        found = self._read(key, allowed, lambda value: _is_whole(value) or _is_list(value, _is_whole))
        return found if isinstance(found, int) else 0

    def section_or_list(self, key: str) -> Section | None:
        """The object; None for a list."""
        found = self._read(key, "an object or a list", lambda value: isinstance(value, (dict, list)))
        return None if isinstance(found, list) else self.section(key)

    def _read(self, key: str, allowed: str, fits: Callable[[Any], bool]) -> Any:
        value = self.values.get(key)
        if value is None or fits(value):
            return value
        came = repr(value)
        raise SpecverifyError(
            f"{self.path}: {self.name}{key} is {came if len(came) <= 80 else came[:77] + '...'}; allowed: {allowed}",
            "correct it, or fetch the file again",
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))
