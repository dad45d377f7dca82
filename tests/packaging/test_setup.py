"""`scripts/setup`, with a Python that only pretends to install: what it leaves behind in every case."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.signals import as_in_a_terminal

ROOT = Path(__file__).parents[2]

#: `-m venv DIR` puts this script itself at DIR/bin/python; `-m pip` is recorded and does what $PIP_DOES says.
PRETENDER = """#!/usr/bin/env bash
case "$1 $2" in
    "-m venv")
        mkdir -p "${@: -1}/bin" "${@: -1}/site"/{pip,package/tests}
        touch "${@: -1}/site"/{single,pip/part,package/part,package/tests/part}.py
        cp "$0" "${@: -1}/bin/python" ;;
    "-m pip")
        echo "pip $*" >> "$RECORD"
        case ${PIP_DOES:-} in
            fail) echo "ERROR: no such distribution"; exit 1 ;;
            wait) echo $$ >> "$RECORD.waiting"; exec sleep 300 ;;
        esac ;;
    "-c from sglang_specverify.upstream"*)
        echo 1.2.3 ;;
    "-c "*"import compileall"*)
        exec "$REAL_PYTHON" "$@" ;;
    "-c import sysconfig"*)
        echo "$(cd "$(dirname "$0")/.." && pwd)/site" ;;
    "-c import sys;"*)
        echo "${PRETENDED_VERSION:-3.11}" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with what the script reads, and the pretending Python beside it."""
    repository = tmp_path / "clone"
    for name in ("scripts", "requirements", "cpu"):
        shutil.copytree(ROOT / name, repository / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", repository)
    (repository / "sglang_specverify").mkdir()
    shutil.copy(ROOT / "sglang_specverify" / "upstream.py", repository / "sglang_specverify")
    python = tmp_path / "python"
    python.write_text(PRETENDER)
    python.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    return repository


def start(clone: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    known = {"HOME": str(clone.parent), "PATH": os.environ["PATH"], "TMPDIR": str(clone.parent / "tmp")}
    own = {
        "SPECVERIFY_PYTHON": str(clone.parent / "python"),
        "REAL_PYTHON": sys.executable,
        "RECORD": str(clone.parent / "record"),
        "SPECVERIFY_SETUP_NEEDS_MB": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the CPU set, also where a GPU is
    }
    return subprocess.Popen(
        [str(clone / "scripts" / "setup"), *arguments],
        env={**known, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    )


def setup(clone: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    process = start(clone, *arguments, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def installs(clone: Path) -> list[str]:
    record = clone.parent / "record"
    return record.read_text().splitlines() if record.exists() else []


def nothing_left(clone: Path) -> bool:
    return not (clone / ".venv").exists() and not any((clone.parent / "tmp").iterdir())


def test_makes_the_environment_once(clone: Path) -> None:
    code, out, err = setup(clone)
    assert (code, err) == (0, "")
    assert "ready" in out
    first = installs(clone)
    assert [("requirements/cpu.txt" in line, "requirements/cpu-nodeps.txt" in line, "-e ." in line) for line in first] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert (clone / ".venv/site/specverify_cpu_standin.pth").read_text().strip() == str(clone / "cpu")
    assert setup(clone) == (0, "", "")
    assert installs(clone) == first
    assert not any((clone.parent / "tmp").iterdir())


def test_what_servers_import_is_compiled(clone: Path) -> None:
    """Also where the environment forbids Python to keep what it compiles, and whatever folder the clone lies in."""
    there = clone.rename(clone.parent / "tests")
    assert setup(there, PYTHONDONTWRITEBYTECODE="1")[0] == 0
    site = there / ".venv/site"
    kept = {str(path.parent.parent.relative_to(site) / path.name.split(".")[0]) for path in site.rglob("*.pyc")}
    assert kept == {"single", "package/part"}


def test_dev_adds_to_what_is_there(clone: Path) -> None:
    setup(clone)
    assert setup(clone, "--dev")[0] == 0
    added = installs(clone)[3:]
    assert len(added) == 2 and "requirements/dev.txt" in added[0] and "download" in added[1] and "sglang==1.2.3" in added[1]
    assert setup(clone, "--dev") == (0, "", "")
    assert setup(clone) == (0, "", "")
    assert len(installs(clone)) == 5


def test_a_failed_dev_leaves_the_rest(clone: Path) -> None:
    setup(clone)
    assert setup(clone, "--dev", PIP_DOES="fail")[0] == 1
    assert setup(clone) == (0, "", "")


@pytest.mark.parametrize("changed", ["requirements/cpu.txt", "requirements/cpu-nodeps.txt", "pyproject.toml"])
def test_changed_inputs_make_it_anew(clone: Path, changed: str) -> None:
    setup(clone)
    with (clone / changed).open("a") as file:
        file.write("# changed\n")
    assert setup(clone)[0] == 0
    assert len(installs(clone)) == 6


def test_a_moved_clone_makes_it_anew(clone: Path) -> None:
    setup(clone)
    moved = clone.rename(clone.parent / "moved")
    assert setup(moved)[0] == 0
    assert len(installs(moved)) == 6


def test_a_failed_install_is_told_and_removed(clone: Path) -> None:
    code, _, err = setup(clone, PIP_DOES="fail")
    assert code == 1
    assert "setup: error: pip could not install the CPU set" in err
    assert "ERROR: no such distribution" in err and "remedy:" in err
    assert nothing_left(clone)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupt_leaves_nothing(clone: Path, number: signal.Signals, code: int) -> None:
    process = start(clone, PIP_DOES="wait")
    waiting = clone.parent / "record.waiting"
    limit = time.monotonic() + 30
    while not (waiting.exists() and waiting.read_text().strip()):
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.02)
    pip = psutil.Process(int(waiting.read_text()))
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert nothing_left(clone)
    assert not pip.is_running()


def test_a_killed_set_up_is_made_anew(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv/specverify-setup").write_text("incomplete\n")
    (clone / ".venv/half").touch()
    assert setup(clone)[0] == 0
    assert not (clone / ".venv/half").exists()


def test_no_disk_space(clone: Path) -> None:
    code, _, err = setup(clone, SPECVERIFY_SETUP_NEEDS_MB="999999999")
    assert code == 1
    assert "999999999 MB" in err and "remedy: free some space" in err
    assert nothing_left(clone) and not installs(clone)


def test_a_wrong_python(clone: Path) -> None:
    code, _, err = setup(clone, PRETENDED_VERSION="3.9")
    assert code == 1
    assert "is not a Python 3.11 or 3.12" in err and "remedy:" in err
    assert nothing_left(clone)


def test_no_python(clone: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "cat", "sha256sum", "cut", "head", "mktemp", "rm", "dirname", "flock"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    code, _, err = setup(clone, PATH=str(tools), SPECVERIFY_PYTHON="")
    assert code == 1
    assert "no Python 3.11 or 3.12 was found (python3 is absent)" in err


def test_a_foreign_environment_is_not_touched(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv/mine").touch()
    code, _, err = setup(clone)
    assert code == 1 and "was not made by scripts/setup" in err
    assert (clone / ".venv/mine").exists()


def test_an_unknown_option(clone: Path) -> None:
    code, _, err = setup(clone, "--gpu")
    assert code == 1 and "unknown option --gpu" in err
    assert nothing_left(clone)


def test_help_names_the_settings(clone: Path) -> None:
    code, out, _ = setup(clone, "--help")
    assert code == 0 and "SPECVERIFY_PYTHON" in out and "--dev" in out and "set -euo" not in out


def test_two_at_once_install_once(clone: Path) -> None:
    if not shutil.which("flock"):
        pytest.skip("without flock nothing keeps two set-ups apart")
    both = [start(clone), start(clone)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(installs(clone)) == 3


def test_pins_cover_the_plugins_own_dependencies() -> None:
    """What pyproject asks for stands in cpu.txt too: the plugin itself is installed without dependencies."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    for wanted in [*project["project"]["dependencies"], *project["build-system"]["requires"]]:
        assert wanted in pinned, sys.version
