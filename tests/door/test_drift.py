"""The drift guard over both supported releases of SGLang, that its table is whole, and that it can fail."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from sglang_specverify.upstream import SUPPORTED
from tests.door import drift
from tests.door.upstream_names import MODULES, NAMES, PASSED_ON

PACKAGE = Path(__file__).parents[2] / "sglang_specverify"
TRITON = "sglang.srt.layers.attention.triton_backend"
STEPS = (
    "handle_deprecated_dp_attention",
    "handle_model_specific_adjustments",
    "handle_speculative_decoding",
    "validate_deepep_v2_dispatch_token_budget",
)


@pytest.fixture(params=SUPPORTED)
def version(request: pytest.FixtureRequest) -> str:
    try:
        drift.source_of(request.param)
    except drift.NotHere as error:
        pytest.fail(str(error))
    return str(request.param)


def test_nothing_changed(version: str) -> None:
    changed = drift.changes(version)
    advice = "\ncheck the plugin against each, then write the table anew: python -m tests.door.drift --write"
    assert not changed, f"SGLang {version} is not what the plugin was written against:\n" + "\n".join(changed) + advice


def test_every_name_exists_in_every_supported_version() -> None:
    absent = [f"{name} in {version}" for name, row in drift.table().items() for version in SUPPORTED if row[version] is None]
    assert absent == []
    assert set(drift.table()) == set(NAMES), "the table holds other names than upstream_names.py"


def test_the_hooked_steps_exist(version: str) -> None:
    """A step that is not in SGLang's list raises at registration; one that the pipeline never runs would be silent."""
    hooks, pipeline = "sglang.srt.arg_groups.resolution_hooks", "sglang.srt.arg_groups.pipeline"
    (allowed,) = drift.find(drift.module_of(version, hooks), ["_OVERRIDABLE_HOOKS"])  # type: ignore[arg-type]
    (runs,) = drift.find(drift.module_of(version, pipeline), ["run_resolution_pipeline"])  # type: ignore[arg-type]
    for step in STEPS:
        assert f"'{step}'" in ast.unparse(allowed)
        assert f"run_hook({step}, server_args)" in ast.unparse(runs)
    source = (PACKAGE / "door" / "resolution.py").read_text()
    assert [step for step in STEPS if f'register_resolution_hook("{step}")' not in source] == []


def _imports() -> Iterator[tuple[str, str]]:
    """(module, name) of everything that the package imports from SGLang; "" where a module is imported whole."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sglang":
                yield from ((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "sglang")


def test_every_import_is_in_the_table() -> None:
    found = set(_imports())
    assert len(found) > 20
    missing = []
    for module, name in sorted(found):
        key = PASSED_ON.get(f"{module}:{name}", f"{module}:{name}")
        as_module = f"{module}.{name}" if name else module
        known = as_module in MODULES or any(entry == key or entry.startswith(f"{key}.") for entry in NAMES)
        if not known:
            missing.append(f"{module}:{name}")
    assert missing == [], "add them to tests/door/upstream_names.py"


@pytest.mark.parametrize("base", ["triton", "flash", "aiter"])
def test_every_overridden_method_is_in_the_table(base: str) -> None:
    module = import_module(f"sglang_specverify.backends.{base}")
    classes = [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]
    assert classes
    missing, seen = set(), 0
    for cls in classes:
        upstream = [parent for parent in cls.__mro__ if parent.__module__.startswith("sglang.")]
        for ours in (parent for parent in cls.__mro__ if parent.__module__.startswith("sglang_specverify.")):
            for name, member in vars(ours).items():
                owner = next((parent for parent in upstream if name in vars(parent)), None)
                if owner is None or not (inspect.isfunction(member) or isinstance(member, property)):
                    continue
                seen += 1
                key = f"{owner.__module__}:{owner.__qualname__}.{name}"
                if key not in NAMES:
                    missing.add(key)
    assert seen >= 2 * len(classes)
    assert missing == set(), "add them to tests/door/upstream_names.py"


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the installed release's Triton backend that may be edited, in a tree that links to the rest."""
    newest = SUPPORTED[-1]
    real = drift.source_of(newest)
    assert isinstance(real, Path)
    copy = tmp_path / newest / (TRITON.replace(".", "/") + ".py")
    at, target = real, tmp_path / newest
    for part in copy.relative_to(target).parts[:-1]:
        target.mkdir(parents=True, exist_ok=True)
        at, target = at / part, target / part
        target.mkdir()
        for entry in at.iterdir():
            if entry.name not in copy.parts:
                (target / entry.name).symlink_to(entry)
    copy.write_text((real / copy.relative_to(tmp_path / newest)).read_text())
    monkeypatch.setenv("SPECVERIFY_UPSTREAM", str(tmp_path))
    monkeypatch.setattr(drift, "installed_version", lambda: None)
    drift.module_of.cache_clear()
    yield copy
    drift.module_of.cache_clear()


def test_an_unedited_copy_passes(edited: Path) -> None:
    assert drift.changes(SUPPORTED[-1]) == []


def test_a_changed_method_is_named(edited: Path) -> None:
    text = edited.read_text()
    head, _, tail = text.partition("    def forward_decode(")
    assert "k is not None" in tail or "save_kv_cache" in tail
    edited.write_text(head + "    def forward_decode(" + tail.replace("save_kv_cache=True", "save_kv_cache=False", 1))
    assert drift.changes(SUPPORTED[-1]) == [f"{TRITON}:TritonAttnBackend.forward_decode: changed"]


def test_a_method_that_is_gone_is_named(edited: Path) -> None:
    edited.write_text(edited.read_text().replace("    def forward_extend(", "    def forward_widely(", 1))
    assert drift.changes(SUPPORTED[-1]) == [f"{TRITON}:TritonAttnBackend.forward_extend: is gone"]


def test_comments_layout_and_docstrings_are_no_change(edited: Path) -> None:
    tree = ast.parse(edited.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("forward_"):
            body = node.body[1:] if isinstance(node.body[0], ast.Expr) else node.body
            node.body = [ast.Expr(ast.Constant("Another docstring.")), *body]
    edited.write_text("# Without its comments and with another layout.\n" + ast.unparse(ast.fix_missing_locations(tree)))
    assert drift.changes(SUPPORTED[-1]) == []


def test_an_absent_release_fails_with_the_command_that_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECVERIFY_UPSTREAM", str(tmp_path))
    monkeypatch.setattr(drift, "installed_version", lambda: None)
    with pytest.raises(drift.NotHere, match=r"pip install --no-deps --target .*0\.5\.22 sglang==0\.5\.22"):
        drift.source_of("0.5.22")


def test_a_wheel_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    (tmp_path / "0.5.22").mkdir()
    with zipfile.ZipFile(tmp_path / "0.5.22" / "sglang-0.5.22-cp311-none-any.whl", "w") as wheel:
        wheel.writestr("sglang/srt/x.py", "if True:\n    def f(a):\n        return f'{a}!'\n")
    monkeypatch.setenv("SPECVERIFY_UPSTREAM", str(tmp_path))
    monkeypatch.setattr(drift, "installed_version", lambda: None)
    drift.module_of.cache_clear()
    assert drift.hash_of("0.5.22", "sglang.srt.x:f") is not None
    assert drift.hash_of("0.5.22", "sglang.srt.x:g") is None
    assert drift.hash_of("0.5.22", "sglang.srt.y:f") is None
    drift.module_of.cache_clear()
