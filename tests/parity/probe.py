"""A second SGLang plugin, for tests only: it watches which tree paths a server accepts, and breaks verify on request.

It loads in every SGLang process through an entry point that `servers.py` writes, and acts in the scheduler only.
`PARITY_PROBE` names its directory: `paths.jsonl` receives one line for each verify step, and `fault`, where it
exists, names the fault to inject from the next step on.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

#: Faults of verify: greedy tokens must differ.
VERIFY_FAULTS = {
    "shifted mask": "each draft token sees its neighbours' ancestors",
    "stale slot": "the newest prefix token is read from another slot",
    "position off by one": "draft tokens are rotated to the position after their own",
    "length off by one": "verify does not see the newest prefix token",
}
#: A fault of the draft: it costs acceptance, and never a token.
DRAFT_FAULT = "draft without its own key"


def accepted_ordinals(accept_index: Any, next_token: Any, next_sibling: Any) -> list[list[int]]:
    """For each request, which child of its parent each accepted draft token is: 0 for the first.

    Args:
        accept_index: [bs, depth + 1] global node index of each accepted token, root first, -1 padded.
        next_token, next_sibling: [bs, W] first child and next sibling of each node, -1 for none.
    """
    paths = []
    for row, children, siblings in zip(accept_index.tolist(), next_token.tolist(), next_sibling.tolist(), strict=True):
        width, path = len(children), []
        nodes = [node % width for node in row if node >= 0]
        for parent, node in itertools.pairwise(nodes):
            child, ordinal = children[parent], 0
            while child != node:
                child, ordinal = siblings[child], ordinal + 1
            path.append(ordinal)
        paths.append(path)
    return paths


def register() -> None:
    """SGLang calls this in each process; only the scheduler's has something to watch."""
    directory = os.environ.get("PARITY_PROBE")
    if directory and "sglang.srt.managers.scheduler" in sys.modules:
        _watch_paths(Path(directory))
        _break_on_request(Path(directory))


def _watch_paths(directory: Path) -> None:
    from sglang.srt.speculative import eagle_utils

    stock = eagle_utils.verify_tree_greedy_func

    def verify(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        paths = accepted_ordinals(result[1], kwargs["retrieve_next_token"], kwargs["retrieve_next_sibling"])
        with (directory / "paths.jsonl").open("a") as file:
            file.write(json.dumps(paths) + "\n")
        return result

    eagle_utils.verify_tree_greedy_func = verify


def _break_on_request(directory: Path) -> None:
    from sglang_specverify.backends import calls, routed
    from sglang_specverify.routing.facts import Mode

    verify, draft, metadata = (
        calls.verify_attention,
        calls.draft_decode_attention,
        routed.RoutedBackend.init_forward_metadata,
    )

    def fault() -> str:
        path = directory / "fault"
        return path.read_text() if path.exists() else ""

    def broken_verify(q: Any, k: Any, v: Any, table: Any, row_ids: Any, prefix_lens: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("mask")
        is_verify = mask is not None or (kwargs.get("num_draft_tokens") or 0) > 1
        if is_verify and fault() == "shifted mask" and mask is not None:
            requests, width = prefix_lens.numel(), kwargs["num_draft_tokens"]
            kwargs["mask"] = mask.reshape(-1)[: requests * width**2].view(requests, width, width).roll(1, -1)
        if is_verify and fault() == "stale slot":
            table = table.clone()
            newest = (prefix_lens - 1) // kwargs.get("page_size", 1)
            table[torch.arange(newest.numel()), newest] = 0
        if is_verify and fault() == "length off by one":
            prefix_lens = prefix_lens - 1
        return verify(q, k, v, table, row_ids, prefix_lens, **kwargs)

    def broken_draft(*args: Any, step: int, **kwargs: Any) -> Any:
        if fault() == DRAFT_FAULT:
            slots = args[6].clone()
            slots[..., step] = 0
            args = (*args[:6], slots, *args[7:])
        return draft(*args, step=step, **kwargs)

    def broken_metadata(self: Any, forward_batch: Any) -> None:
        metadata(self, forward_batch)
        step = self.step
        if step is not None and step.mode is Mode.TARGET_VERIFY and fault() == "position off by one":
            drafts = forward_batch.positions.view(step.rows, -1)
            drafts[:, 1:] += 1

    calls.verify_attention = broken_verify
    calls.draft_decode_attention = broken_draft
    routed.RoutedBackend.init_forward_metadata = broken_metadata
