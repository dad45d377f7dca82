"""What a parity run asks of a server, and how two answers are compared."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_specverify.demo import tokenizer
from sglang_specverify.demo.server import Server

#: Prompt lengths in tokens: inside a page, at its edge and over several, for page sizes 16 and 64.
LENGTHS = (3, 9, 16, 33, 70, 130)
NEW_TOKENS = 24

#: Log-probability margin under which two right runs may choose differently.
#: float32: a hidden state is a sum of a few hundred products of relative error 2**-24 each, and logits stay under 16; 1e-4 is ten
#: times their worst sum. bfloat16: a logit is rounded to 8 bits, so near 8 it moves by 2**-8 * 8 = 0.03, and the hidden
#: state behind it carries the rounding of two layers; four such steps on each of two logits make 0.25.
NOISE = {"float32": 1e-4, "bfloat16": 0.25}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one prompt; `margins` between the two best where the server was asked for them."""

    tokens: list[int]
    margins: list[float]
    meta: dict[str, Any]


def prompts(seed: int = 0) -> list[list[int]]:
    """One prompt of each length, of tokens that the models know."""
    live, source = tokenizer.printable_ids(), random.Random(seed)
    return [source.choices(live, k=length) for length in LENGTHS]


def generate(server: Server, ids: list[int], *, margins: bool = False, **sampling: Any) -> Answer:
    """One greedy request over HTTP."""
    payload: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, **sampling},
    }
    if margins:
        payload |= {"return_logprob": True, "top_logprobs_num": 2}
    answer = server.generate(payload)
    tops = answer["meta_info"].get("output_top_logprobs", []) if margins else []
    return Answer(answer["output_ids"], [best[0] - second[0] for best, second in tops], answer["meta_info"])


def generate_all(server: Server, batch: list[list[int]], **options: Any) -> list[Answer]:
    """Several requests in flight at once."""
    with ThreadPoolExecutor(len(batch)) as pool:
        return list(pool.map(lambda ids: generate(server, ids, **options), batch))


def abort_in_flight(server: Server, ids: list[int]) -> int:
    """Start a long streamed request, abort it after its first tokens; how many tokens came."""
    import requests

    rid = f"aborted-{len(ids)}"
    payload = {
        "input_ids": ids,
        "rid": rid,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
    }
    chunks = 0
    with requests.post(f"{server.url}/generate", json=payload, stream=True, timeout=300) as stream:
        for line in stream.iter_lines():
            if line.startswith(b"data:") and b"[DONE]" not in line:
                chunks += 1
                if chunks == 2:
                    server.post("/abort_request", {"rid": rid})
    return chunks


@dataclass
class Comparison:
    """How far two runs agreed. `undecided` counts runs that stopped at a margin below the noise."""

    compared: int = 0
    undecided: int = 0
    differences: int = 0

    def add(self, got: Answer, want: Answer, noise: float, length: int | None = None) -> None:
        """Compare up to the first position whose margin is below `noise`; past one, two right runs may part."""
        wanted = want.tokens if length is None else want.tokens[:length]
        both = min(len(got.tokens), len(wanted))
        assert len(got.tokens) == len(wanted) or got.tokens[:both] != wanted[:both], "a right run ended at another place"
        for ours, theirs, margin in zip(got.tokens, wanted, want.margins, strict=False):
            if ours != theirs:
                self.undecided += margin < noise
                self.differences += margin >= noise
                return
            self.compared += 1
