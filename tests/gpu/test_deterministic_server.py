"""What `deterministic_server` compares and when it fails; no server is started."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import deterministic_server as server
from tests.gpu.deterministic_server import Batch, Reply, batches, compare, difference, problems_of

ALONE = [Reply((1, 2, 3), (-0.5, -0.25, -1.0)), Reply((4, 5, 6), (-2.0, -0.125, 0.0))]


def test_any_bit_is_a_difference() -> None:
    alone = ALONE[0]
    assert difference(alone, alone) is None
    assert difference(Reply((1, 2, 4), alone.logprobs), alone) == {"what": "token", "at": 2}
    assert difference(Reply((1, 2), alone.logprobs[:2]), alone) == {"what": "length", "at": 2}
    near = Reply(alone.tokens, (-0.5, -0.25000000000000006, -1.0))
    wrong = difference(near, alone)
    assert wrong is not None and (wrong["what"], wrong["at"]) == ("log-probability", 1)
    assert difference(near, alone, tokens_only=True) is None
    nan = Reply((1,), (float("nan"),))
    assert difference(nan, nan) is not None


def test_an_answer_whose_log_probabilities_are_of_other_tokens() -> None:
    answer: dict[str, Any] = {"output_ids": [7], "meta_info": {"output_token_logprobs": [[-0.5, 7, None]]}}
    assert Reply.of(answer) == Reply((7,), (-0.5,))
    answer["output_ids"] = [8]
    with pytest.raises(ValueError, match="other tokens"):
        Reply.of(answer)


def test_batches_are_of_many_sizes_and_ways() -> None:
    found = batches(22, 16, 20)
    assert found == batches(22, 16, 20) and len(found) == 21
    assert {batch.how for batch in found} == {"one request", "at once", "one after another"}
    assert [batch.flush for batch in found] == [True] * 20 + [False]
    assert {member for batch in found for member in batch.members} == set(range(22))
    assert len({len(batch.members) for batch in found}) >= 6 and len({batch.members for batch in found}) >= 18
    # Around where the kernel divides a prefix, and far beyond.
    assert sum(length > 4000 for length in server.LENGTHS) >= 8


def test_what_differs_is_counted_by_request() -> None:
    off = Reply((1, 2, 3), (-0.5, -0.25, -1.5))
    todo = [Batch("at once", (0, 1)), Batch("one request", (1, 0, 0)), Batch("at once", (0, 1), flush=False)]
    sent = {todo[0]: ALONE, todo[1]: [ALONE[1], off, ALONE[0]], todo[2]: [off, ALONE[1]]}
    found = compare(sent.__getitem__, todo, ALONE)
    assert (found["batches"], found["compared"], found["differing requests"], found["of"]) == (3, 5, 1, 2)
    assert found["kept prefix cache"] == {"compared": 2, "differing": 1} and found["differences in the first token"] == 0
    assert [(one["prompt"], one["at"]) for one in found["differences"]] == [(0, 2)]


def right() -> dict[str, Any]:
    greedy = {"differing requests": 0, "of": 22, "differing alone, asked twice": 0, "compared": 99, "distinct tokens": 40}
    kernels = {mode: {"fused": 9} for mode in server.CHAIN_MODES}
    variants = {
        "variant fused_split: verify": 9,
        "variant fused: draft": 2,
        "deterministic fused_split": 9,
        "deterministic fused": 2,
    }
    return {
        "greedy": greedy, "kernels": kernels, "variants": variants, "troubles in the log": [], "most requests at once": 16,
        "paths": {"accepted at depth 2 or more": 5, "of these not through the first branch": 0},
        "server": {"enable_deterministic_inference": True}, "logged batches": {"graph": 9, "eager": 0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"greedy": {"differing requests": 1}}, "1 of 22 requests differ"),
        ({"greedy": {"differing alone, asked twice": 2}}, "asked twice"),
        ({"greedy": {"compared": 0}}, "nothing was compared"),
        ({"greedy": {"distinct tokens": 3}}, "3 distinct tokens"),
        ({"kernels": {"target_verify": {"stock": 9}}}, "target_verify ran on stock"),
        ({"variants": {"deterministic fused_split": 8}}, "not every call was deterministic"),
        ({"variants": {"variant fused_split: verify": 2, "deterministic fused_split": 0}}, "no prefix was divided"),
        ({"paths": {"accepted at depth 2 or more": 0}}, "no draft was accepted"),
        ({"server": {"enable_deterministic_inference": False}}, "does not say that it is deterministic"),
        ({"logged batches": {"graph": 0}}, "CUDA graphs"),
        ({"most requests at once": 2}, "at most 2 requests"),
        ({"troubles in the log": ["Traceback"]}, "log: Traceback"),
    ],
)
def test_when_it_fails(changes: dict[str, Any], what: str) -> None:
    row = server.ROWS[0]
    assert problems_of(row, right(), has_gpu=True) == []
    given = right()
    for name, value in changes.items():
        given[name] = {**given[name], **value} if isinstance(value, dict) else value
    assert any(what in problem for problem in problems_of(row, given, has_gpu=True))
