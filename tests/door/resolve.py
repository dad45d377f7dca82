"""SGLang's own argument resolution, and `specverify explain`, asked about the same server line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_specverify.cli.describe import Explanation, explain
from sglang_specverify.flags import read
from sglang_specverify.hardware import from_name
from tests.door.machines import device_of, machine

PLUGIN = "--attention-backend specverify"
_DRAFT = "--speculative-algorithm STANDALONE --speculative-draft-model-path {qwen3} --speculative-num-steps 3"
CHAIN = f"{_DRAFT} --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
TREE = f"{_DRAFT} --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
NGRAM = "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8"


def arguments(machine_name: str, models: Mapping[str, Path], model: str, line: str) -> list[str]:
    """The whole server line. In `line`, "{kind}" stands for that model's directory."""
    head = ["--model-path", str(models[model]), "--device", device_of(machine_name), "--skip-tokenizer-init"]
    return [*head, *line.format(**models).split()]


def resolve(machine_name: str, line: list[str]) -> tuple[Any, Any]:
    """SGLang's own parser and resolution on `machine_name`: the record of raw arguments, and its resolved view."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    with machine(machine_name):
        server_args = prepare_server_args(line)
        server_args.resolve_once()
        return server_args, resolved_view(server_args)


def explained(machine_name: str, line: list[str], *, aiter: bool) -> Explanation:
    """What `specverify explain` works out for the same line on the same machine."""
    return explain(None, from_name(machine_name), line, read(), frozenset({"aiter"} if aiter else ()))
