"""The models have the structure that makes a comparison able to fail, measured with Hugging Face's own Llama."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_specverify.demo import models, tokenizer
from sglang_specverify.demo import run as demonstration
from sglang_specverify.demo.forks import earliest_meeting
from sglang_specverify.errors import ArgumentError

PROMPTS = ("a", "the quick brown fox", "hello world, this is a test " * 4, "Tell me about lazy dogs. " * 8, "0 1 2 3 4 5 6 7")
STEPS = 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in models.KINDS:
        models.build(kind, root / kind)
    return root


@pytest.fixture(scope="module")
def run(directory: Path) -> Any:
    """`run(kind, ids)`: the logits [positions, vocab] that Hugging Face computes; a row for each row of `attention_mask`."""
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)  # threads only wait for each other in models of this size

    @cache
    def loaded(kind: str) -> Any:
        return LlamaForCausalLM.from_pretrained(directory / kind, dtype=torch.float32).eval()

    def logits(kind: str, ids: list[int], **options: Any) -> torch.Tensor:
        rows = len(options.get("attention_mask", [ids]))
        with torch.no_grad():
            found: torch.Tensor = loaded(kind)(torch.tensor([ids] * rows), **options).logits
        return found if "attention_mask" in options else found[0]

    return logits


@pytest.fixture(scope="module")
def texts(directory: Path, run: Any) -> list[tuple[int, list[int]]]:
    """(prompt length, prompt and greedy continuation) for each prompt."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(directory / "target")
    found = []
    for prompt in PROMPTS:
        ids = encode(prompt).input_ids
        start = len(ids)
        for _ in range(STEPS):
            ids = [*ids, int(run("target", ids)[-1].argmax())]
        found.append((start, ids))
    return found


def produced(texts: list[tuple[int, list[int]]]) -> list[tuple[list[int], int]]:
    """(prefix, next token) of every produced token, the first of each text left out: a prompt may end in any token."""
    return [(ids[:place], ids[place]) for start, ids in texts for place in range(start + 1, len(ids))]


def test_every_choice_is_one_of_the_two_successors(run: Any, texts: list[tuple[int, list[int]]]) -> None:
    forks = models.forks()
    assert all(token in (int(forks.first[prefix[-1]]), int(forks.second[prefix[-1]])) for prefix, token in produced(texts))


def test_outputs_do_not_settle(texts: list[tuple[int, list[int]]]) -> None:
    assert all(len(set(ids[start:])) >= 8 for start, ids in texts)


def test_context_takes_both_ways(texts: list[tuple[int, list[int]]]) -> None:
    forks = models.forks()
    first = [int(forks.first[prefix[-1]]) == token for prefix, token in produced(texts)]
    assert 0.25 < sum(first) / len(first) < 0.75


def test_margins_are_above_the_noise_of_bfloat16(run: Any, texts: list[tuple[int, list[int]]]) -> None:
    margins = []
    for start, ids in texts:
        best = run("target", ids)[start:-1].topk(2).values
        margins += (best[:, 0] - best[:, 1]).tolist()
    margins.sort()
    # Logits lie between 4 and 8, where bfloat16 steps by 1/32.
    assert margins[len(margins) // 2] > 0.5
    assert sum(margin < 1 / 16 for margin in margins) < 0.1 * len(margins)


def test_prompts_of_the_demonstration_leave_no_narrow_choice(directory: Path, run: Any) -> None:
    """So that it ends with equal tokens in bfloat16 too, where logits of 4 to 8 step by 1/32."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(directory / "target")
    chats = [[{"role": "user", "content": text}] for text in demonstration._CHAT]
    texts = [encode.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    for text in [*demonstration._GENERATE, *texts]:
        ids = encode(text).input_ids
        for _ in range(demonstration.NEW_TOKENS):
            best = run("target", ids)[-1].topk(2)
            assert float(best.values[0] - best.values[1]) > 0.08
            ids = [*ids, int(best.indices[0])]


def test_a_missing_key_changes_choices_near_and_far(run: Any, texts: list[tuple[int, list[int]]]) -> None:
    """Every prefix without one of its keys: which choices change, by how far back the key was."""
    changed, asked = {"near": 0, "far": 0}, {"near": 0, "far": 0}
    for start, ids in texts:
        for place in range(start + 2, len(ids) - 1, 9):
            back = torch.arange(1, min(place, 32))
            mask = torch.ones(len(back), place + 1, dtype=torch.long)
            mask[torch.arange(len(back)), place - back] = 0
            position = torch.arange(place + 1).unsqueeze(0)
            choices = run("target", ids[: place + 1], attention_mask=mask, position_ids=position)
            for distance, choice in zip(back.tolist(), choices[:, -1].argmax(-1).tolist(), strict=True):
                where = "near" if distance <= 4 else "far"
                asked[where] += 1
                changed[where] += int(choice != ids[place + 1])
    assert changed["near"] >= 0.05 * asked["near"]
    assert changed["far"] >= 0.02 * asked["far"]


def test_a_shift_by_one_changes_choices(run: Any, texts: list[tuple[int, list[int]]]) -> None:
    """The last token placed one too far."""
    changed = 0
    for start, ids in texts:
        for place in range(start + 2, len(ids) - 1, 3):
            shifted = torch.arange(place + 1).unsqueeze(0)
            shifted[0, -1] += 1
            changed += int(run("target", ids[: place + 1], position_ids=shifted)[-1].argmax() != ids[place + 1])
    assert changed >= 3


def test_mirror_ranks_the_truth_second(run: Any, texts: list[tuple[int, list[int]]]) -> None:
    for start, ids in texts:
        truth = run("target", ids)[start:-1].argmax(-1)
        best = run("mirror", ids)[start:-1].topk(2)
        assert torch.equal(best.indices[:, 1], truth)
        # Close enough for a small tree to keep both.
        assert float((best.values[:, 0] - best.values[:, 1]).median()) < 0.4


def test_copy_is_the_target(directory: Path) -> None:
    files = [(directory / kind / "model.safetensors").read_bytes() for kind in ("target", "copy")]
    assert files[0] == files[1]


@pytest.mark.parametrize("kind", models.KINDS)
def test_equal_arguments_give_equal_files(directory: Path, kind: str, tmp_path: Path) -> None:
    again = models.build(kind, tmp_path / "again")
    names = sorted(path.name for path in again.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert all((again / name).read_bytes() == (directory / kind / name).read_bytes() for name in names)


def test_a_narrow_dtype_is_the_wide_one_rounded(directory: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    narrow = load_file(models.build("eagle3", tmp_path, "bfloat16") / "model.safetensors")
    wide = load_file(directory / "eagle3" / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, weight in wide.items():
        assert torch.equal(narrow[name], weight.bfloat16() if weight.is_floating_point() else weight)


def test_eagle3_vocabulary_maps_to_live_tokens(directory: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(directory / "eagle3" / "model.safetensors")
    mapped = weights["d2t"] + torch.arange(weights["d2t"].numel())
    assert mapped.tolist() == tokenizer.printable_ids()
    assert weights["lm_head.weight"].shape[0] == mapped.numel()


def test_successors_are_two_permutations_of_the_live_tokens() -> None:
    forks, live = models.forks(), tokenizer.printable_ids()
    for successor in (forks.first, forks.second):
        assert sorted(successor[live].tolist()) == live
        assert int((successor >= 0).sum()) == len(live)
    assert bool((forks.first[live] != forks.second[live]).all())
    assert not set(live) & {tokenizer.UNKNOWN, tokenizer.BOS, tokenizer.EOS}


@pytest.mark.parametrize("size, stride", [(7, 3), (12, 5), (12, 4), (19, 7), (20, 2)])
def test_earliest_meeting_against_enumeration(size: int, stride: int) -> None:
    def meeting() -> int:
        counts: dict[int, set[tuple[int, int]]] = {0: {(0, 0)}}
        for length in itertools.count(1):
            for ones in range(length + 1):
                counts.setdefault((ones + (length - ones) * stride) % size, set()).add((ones, length - ones))
            if any(len(ways) > 1 for ways in counts.values()):
                return length
        raise AssertionError

    assert earliest_meeting(size, stride) == meeting()


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="kind: got 'medusa'; allowed: target, mirror"):
        models.build("medusa", tmp_path / "none")
    with pytest.raises(ArgumentError, match="dtype: got 'int8'"):
        models.build("target", tmp_path / "none", "int8")
    assert not (tmp_path / "none").exists()
