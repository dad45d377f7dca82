"""What every result file carries beside its numbers: versions, hardware, date and command."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_specverify import __version__
from sglang_specverify.hardware import detect

_PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flash-attn-4", "flashinfer-python", "transformers", "numpy")


def environment() -> dict[str, Any]:
    """Versions, hardware, date (UTC) and command of this process."""
    machine = detect()
    return {
        "date": date(),
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(_short, sys.argv[1:])]),
        "versions": {
            "python": platform.python_version(),
            "sglang-specverify": __version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        "hardware": {"name": machine.name, "arch": machine.arch, "count": machine.count, "driver": _driver()},
    }


def date() -> str:
    """Now, as result files write it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def text_of(found: dict[str, Any]) -> str:
    """JSON with a line for each row of a list: files of hundreds of points stay small, and a point that changes is one line."""

    def value(each: object) -> str:
        if not isinstance(each, list) or not each:
            return json.dumps(each, indent=2, ensure_ascii=False).replace("\n", "\n  ")
        rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in each)
        return f"[\n{rows}\n  ]"

    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {value(each)}" for name, each in found.items()) + "\n}\n"


def write(path: Path, results: dict[str, Any]) -> None:
    """Write `results` with their environment, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text_of({**environment(), **results}))
    partial.rename(path)


def _short(argument: str) -> str:
    """The last part of a path: the rest is one machine's own."""
    return Path(argument).name if argument.startswith("/") else argument


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
