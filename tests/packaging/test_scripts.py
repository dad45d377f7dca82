"""Every script works in its own clone, from whatever directory and with whatever CDPATH it is started."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(str(path.relative_to(ROOT)) for folder in ("scripts", ".ci") for path in (ROOT / folder).iterdir())
#: What a script may start, by its path in the clone.
STARTED = ("scripts/setup", "scripts/test", *(f".venv/bin/{name}" for name in ("python", "specverify", "ruff", "mypy")))
RECORDER = '#!/usr/bin/env bash\nrealpath "$0" >> "$RECORD"\n'


def clone_of(script: str, at: Path) -> Path:
    """`script` as it is, and a recorder in place of everything that it may start."""
    for name in (*STARTED, script):
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(RECORDER)
        (at / name).chmod(0o755)
    shutil.copy(ROOT / script, at / script)
    return at


def started(script: str, clone: Path, at: Path, *arguments: str, cdpath: str = "") -> tuple[str, list[Path]]:
    """Start `script` of `clone` by its path from `at`; what it printed, and what was started."""
    record = clone.parent / "record"
    done = subprocess.run(
        # By bash, so that the name has no "./" before it: with one, cd looks for nothing in CDPATH.
        ["bash", os.path.relpath(clone / script, at), *arguments],
        cwd=at,
        env={"PATH": os.environ["PATH"], "RECORD": str(record), "CDPATH": cdpath},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = record.read_text().splitlines() if record.exists() else []
    return done.stdout, [Path(line) for line in lines]


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "scripts/setup"])
def test_cdpath_leads_no_script_away(tmp_path: Path, script: str) -> None:
    """`cd scripts/..` goes to the first folder of CDPATH that has one, and prints where that is."""
    clone, elsewhere = clone_of(script, tmp_path / "clone"), clone_of(script, tmp_path / "elsewhere")
    for cdpath in (f"{elsewhere}:.", f".:{elsewhere}"):
        _, found = started(script, clone, clone, cdpath=cdpath)
        assert found and all(path.is_relative_to(clone) for path in found), found


@pytest.mark.parametrize("start", [".", "scripts", ".."])
def test_setup_tells_its_options_from_everywhere(tmp_path: Path, start: str) -> None:
    clone, elsewhere = clone_of("scripts/setup", tmp_path / "clone"), clone_of("scripts/setup", tmp_path / "elsewhere")
    for cdpath in ("", f"{elsewhere}:.", f".:{elsewhere}"):
        said, _ = started("scripts/setup", clone, (clone / start).resolve(), "--help", cdpath=cdpath)
        assert said.startswith("Make .venv: ") and "SPECVERIFY_PYTHON" in said, (cdpath, said)
