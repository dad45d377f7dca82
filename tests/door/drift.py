"""The drift guard: has anything that the plugin relies on changed in SGLang?

    python -m tests.door.drift            compare both supported versions with the table
    python -m tests.door.drift --write    write the table anew, after the plugin was checked against what changed

SGLang is read as text, never imported, so both versions can be compared in one environment. The installed one is read
where it lies; any other from `$SPECVERIFY_UPSTREAM` (by default `.venv/upstream`), which holds a directory
for each version with the package in it, or its wheel.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from sglang_specverify.upstream import SUPPORTED, installed_version
from tests.door.upstream_names import ARGUMENTS, NAMES

TABLE = Path(__file__).with_name("upstream_hashes.json")
_ROOT = Path(__file__).parents[2]
_BLOCKS = (ast.If, ast.Try, ast.With)


class NotHere(Exception):
    """A version's source that is not on this machine; the text says how to get it."""


def source_of(version: str) -> Path | zipfile.Path:
    """The directory that holds the package `sglang` of `version`.

    Raises:
        NotHere: neither installed nor fetched; names the command that fetches it.
    """
    if (installed_version() or "").partition("+")[0] == version:
        found = importlib.util.find_spec("sglang")
        if found is not None and found.submodule_search_locations:
            return Path(next(iter(found.submodule_search_locations))).parent
    directory = Path(os.environ.get("SPECVERIFY_UPSTREAM") or _ROOT / ".venv" / "upstream") / version
    if (directory / "sglang").is_dir():
        return directory
    for wheel in sorted(directory.glob(f"sglang-{version}-*.whl")):
        return _opened(wheel)
    raise NotHere(
        f"the source of SGLang {version} is not in {directory}; fetch it with: "
        f"python -m pip install --no-deps --target {directory} sglang=={version}"
    )


@functools.cache
def _opened(wheel: Path) -> zipfile.Path:
    """Once: to read what a wheel holds takes longer than to read a module."""
    return zipfile.Path(wheel)


@functools.cache
def _parsed(text: str) -> ast.Module:
    """By the text, not by where it lies: trees that differ in one file share the rest."""
    return ast.parse(text)


@functools.cache
def module_of(version: str, module: str) -> ast.Module | None:
    """One module, parsed; None where this version has none of that name."""
    package = source_of(version)
    for tail in (".py", "/__init__.py"):
        file = package / (module.replace(".", "/") + tail)
        if file.is_file():
            return _parsed(file.read_text(encoding="utf-8"))
    return None


def hash_of(version: str, name: str) -> str | None:
    """The hash of "module:name" in `version`; None where it does not exist there."""
    module, _, path = name.partition(":")
    tree = module_of(version, module)
    found: list[ast.AST] = [] if tree is None else list(find(tree, path.split(".")))
    if not found:
        return None
    return hashlib.sha256("\n".join(normal(node) for node in found).encode()).hexdigest()[:16]


def find(scope: ast.AST, path: list[str]) -> Iterator[ast.AST]:
    """Every definition of a dotted name: functions, classes, assignments and imports, also those under an `if` or `try`."""
    for node in getattr(scope, "body", ()):
        yield from _match(node, path)


def _match(node: ast.stmt, path: list[str]) -> Iterator[ast.AST]:
    head, *rest = path
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if node.name == head:
            yield from find(node, rest) if rest else [node]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not rest and any(isinstance(target, ast.Name) and target.id == head for target in targets):
            yield node
    elif isinstance(node, ast.Import | ast.ImportFrom):
        if not rest and any((alias.asname or alias.name) == head for alias in node.names):
            alias = next(alias for alias in node.names if (alias.asname or alias.name) == head)
            yield ast.ImportFrom(module=getattr(node, "module", None), names=[alias], level=0)
    elif isinstance(node, _BLOCKS):
        for part in ("body", "orelse", "finalbody"):
            for inner in getattr(node, part, ()):
                yield from _match(inner, path)
        for handler in getattr(node, "handlers", ()):
            for inner in handler.body:
                yield from _match(inner, path)


def normal(node: ast.AST) -> str:
    """A node as text: without comments, layout and docstrings, and the same on every supported Python."""
    fields = []
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "type_comment", "kind"):
            continue
        if name == "body" and isinstance(value, list) and _is_docstring(value[:1]):
            value = value[1:]
        if isinstance(node, ast.JoinedStr):
            value = _joined(value)
        if isinstance(value, list):
            parts = [normal(item) if isinstance(item, ast.AST) else repr(item) for item in value]
            text = f"[{', '.join(parts)}]" if parts else ""
        elif isinstance(value, ast.AST):
            text = normal(value)
        else:
            text = "" if value is None and not isinstance(node, ast.Constant) else repr(value)
        if text:
            fields.append(f"{name}={text}")
    return f"{type(node).__name__}({', '.join(fields)})"


def _is_docstring(head: list[ast.stmt]) -> bool:
    return bool(head) and isinstance(head[0], ast.Expr) and isinstance(getattr(head[0].value, "value", None), str)


def _joined(parts: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, neighbouring texts made one: where they are split depends on the Python."""
    whole: list[ast.expr] = []
    for part in parts:
        if isinstance(part, ast.Constant) and whole and isinstance(whole[-1], ast.Constant):
            whole[-1] = ast.Constant(value=str(whole[-1].value) + str(part.value))
        elif not (isinstance(part, ast.Constant) and part.value == ""):
            whole.append(part)
    return whole


def arguments_of(version: str) -> dict[str, set[str]]:
    """Namespace -> the server arguments that this version declares under it."""
    declared: dict[str, set[str]] = {}
    for file in (source_of(version) / "sglang" / "srt" / "arg_groups" / "fields").iterdir():
        tree = _parsed(file.read_text(encoding="utf-8")) if file.name.endswith(".py") else ast.Module([], [])
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                for path in find(node, ["_NS_PATH"]):
                    names = {field.target.id for field in node.body if _is_field(field)}  # type: ignore[attr-defined]
                    declared.setdefault(ast.literal_eval(path.value), set()).update(names)  # type: ignore[attr-defined]
    return declared


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def table() -> dict[str, dict[str, str | None]]:
    """The written table: name -> version -> hash, None where the name does not exist."""
    read: dict[str, dict[str, str | None]] = json.loads(TABLE.read_text())
    return read


def changes(version: str) -> list[str]:
    """Each name that differs from the table in `version`, with what happened to it."""
    written, found = table(), []
    for name in NAMES:
        before, now = written.get(name, {}).get(version, "unwritten"), hash_of(version, name)
        if before == "unwritten":
            found.append(f"{name}: not in the table")
        elif now != before:
            found.append(f"{name}: {'is gone' if now is None else 'is new' if before is None else 'changed'}")
    declared = arguments_of(version)
    for space, names in ARGUMENTS.items():
        found += [f"server argument {name}: not declared in {space}" for name in names if name not in declared.get(space, ())]
    return found


def main(arguments: list[str]) -> int:
    """Compare, or write the table; returns the exit code."""
    if arguments == ["--write"]:
        hashes = {name: {version: hash_of(version, name) for version in SUPPORTED} for name in sorted(NAMES)}
        TABLE.write_text(json.dumps(hashes, indent=1) + "\n")
        return 0
    if arguments:
        print("usage: python -m tests.door.drift [--write]", file=sys.stderr)
        return 2
    found = [f"SGLang {version}: {change}" for version in SUPPORTED for change in changes(version)]
    print("\n".join(found) or "nothing the plugin relies on has changed")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except NotHere as error:
        sys.exit(f"drift: {error}")
