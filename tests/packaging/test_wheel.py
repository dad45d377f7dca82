"""The wheel holds the package and nothing else."""

from __future__ import annotations

import configparser
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_specverify import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, as a build writes beside its sources."""
    copy = tmp_path_factory.mktemp("wheel") / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("sglang_specverify", "configs", "cpu", "tests"):
        # The launch tables are a link into configs/, and stay one here as in a checkout.
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    out = copy.parent / "out"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    done = subprocess.run([*command, "-w", str(out), str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    assert built.name == f"sglang_specverify-{__version__}-py3-none-any.whl"
    return zipfile.ZipFile(built)


def text(wheel: zipfile.ZipFile, ending: str) -> str:
    (name,) = [name for name in wheel.namelist() if name.endswith(ending)]
    return wheel.read(name).decode()


def test_holds_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "sglang_specverify").rglob("*.py")}
    assert sources <= packed
    assert "sglang_specverify/py.typed" in packed
    assert {name.split("/")[0] for name in packed} == {"sglang_specverify"}
    assert not [name for name in wheel.namelist() if "sgl_kernel" in name]


def test_holds_every_launch_table_as_a_file(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    shipped = {path.name: path.read_bytes() for path in (ROOT / "configs" / "kernels").glob("*.json")}
    assert len(shipped) >= 6
    prefix = "sglang_specverify/kernels/configs/"
    packed = [info for info in wheel.infolist() if info.filename.startswith(prefix) and not info.is_dir()]
    assert {info.filename.removeprefix(prefix): wheel.read(info) for info in packed} == shipped
    assert not any(stat.S_ISLNK(info.external_attr >> 16) for info in packed)

    # Read from the wheel's own files, as an installed package does.
    wheel.extractall(tmp_path)
    script = (
        "from sglang_specverify.kernels import tables; print(tables.__file__, *map(tables.read, tables.shipped()), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    module, *read = done.stdout.splitlines()
    assert module == str(tmp_path / "sglang_specverify" / "kernels" / "tables.py")
    assert [line.split("'")[1] for line in read] == sorted(name.removesuffix(".json") for name in shipped)


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(text(wheel, "entry_points.txt"))
    assert dict(parser["sglang.srt.plugins"]) == {"specverify": "sglang_specverify.plugin:register"}
    assert dict(parser["console_scripts"]) == {"specverify": "sglang_specverify.cli:main"}


def test_metadata(wheel: zipfile.ZipFile) -> None:
    lines = text(wheel, ".dist-info/METADATA").splitlines()
    assert f"Version: {__version__}" in lines
    assert "License-Expression: Apache-2.0" in lines
    assert {line.partition(": ")[2] for line in lines if line.startswith("Requires-Python")} in (
        {"<3.13,>=3.11"},
        {">=3.11,<3.13"},
    )
    required = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist")]
    # SGLang is an extra: it must not be fetched by installing the plugin.
    assert [name for name in required if "extra" not in name] == [name for name in required if name.startswith("typer")]
    assert any(name.startswith("sglang") and 'extra == "sglang"' in name for name in required)


def test_licence_text(wheel: zipfile.ZipFile) -> None:
    assert "Apache License" in text(wheel, "licenses/LICENSE")
