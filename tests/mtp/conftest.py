"""The checkpoints, written once, and loaded once by SGLang in a process of its own, with and without the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.mtp.checkpoints import Written
from tests.mtp.kinds import BROKEN, KINDS, OTHERS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SGLANG_") or name == "COLUMNS":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """Kind -> its checkpoint, of all kinds in `checkpoints`."""
    directory = tmp_path_factory.mktemp("checkpoints")
    kinds = {**KINDS, **OTHERS, **{name: kind for name, (kind, _) in BROKEN.items()}}
    return {name: Written(kind, directory / str(number), number) for number, (name, kind) in enumerate(kinds.items())}


@dataclass(frozen=True)
class Load:
    """One load: the error, whether it was the plugin's, how many tensors were read, and the model's parameters."""

    error: str | None
    ours: bool
    read: int
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    stock: Load
    hooked: Load
    fuses: bool | None


@pytest.fixture(scope="session")
def loaded(written: dict[str, Written], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """Kind -> what SGLang's own loader makes of it, alone and with the hook."""
    out = tmp_path_factory.mktemp("loaded")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.mtp.load",
        str(out),
        *(str(one.directory) for one in written.values()),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environment |= {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "tests.mtp.models"
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    assert ended.returncode == 0, ended.stderr[-4000:]
    outcomes = json.loads((out / "outcomes.json").read_text())

    def load(found: dict[str, Any]) -> Load:
        file = out / found["file"]
        return Load(found["error"], found["ours"], found["read"], load_file(file) if file.exists() else {})

    found = {name: outcomes[str(one.directory)] for name, one in written.items()}
    return {name: Loaded(load(one["stock"]), load(one["hooked"]), one["fuses"]) for name, one in found.items()}
