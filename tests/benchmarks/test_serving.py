"""Whole servers on a GPU: which ones run, and what makes one fail. The pure parts; no server is started."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import serving_judge, serving_memory, serving_models, serving_prompts
from benchmarks.serving_farm import TROUBLE, Answer, reserve_port
from benchmarks.serving_judge import Tally
from benchmarks.serving_models import REAL
from benchmarks.serving_rows import (
    COVER,
    DRY,
    EXTRA,
    FACTORS,
    TENSOR_PARALLEL,
    Row,
    Size,
    arguments,
    missing_pairs,
    with_references,
)
from sglang_specverify.flags import read
from sglang_specverify.hardware import from_name
from sglang_specverify.routing import CallFacts, LayerFacts, LayerKind, Mode, ServerFacts, decide
from tests.gpu import endurance, servers_load

H200 = replace(from_name("sm_90"), multiprocessors=132)
MODELS = {"target": "T", "mirror": "M", "copy": "C"}
GPU = Size(True, 16384, 65536, 16)
WANT = Answer([5, 6, 7, 8], {}, [1.0, 0.1, 1.0, 1.0])


def kernel(row: Row, mode: Mode) -> str:
    """What the router takes for a row's batches on an H200."""
    drafts = arguments(row, REAL, MODELS, GPU)
    value = {name: drafts[drafts.index(f"--speculative-{name}") + 1] for name in ("eagle-topk", "num-steps", "num-draft-tokens")}
    server = ServerFacts(
        row.base, "STANDALONE", int(value["eagle-topk"]), int(value["num-steps"]), int(value["num-draft-tokens"]),
        page_size=row.page_size, kv_cache_dtype="bfloat16" if row.cache == "bf16" else "float8_e4m3fn", dtype="bfloat16",
        context=GPU.context,
    )  # fmt: skip
    layer = LayerFacts(LayerKind.FULL, REAL.q_heads, REAL.kv_heads, REAL.head_dim, REAL.head_dim)
    return decide(H200, server, layer, mode, read(row.flags), CallFacts()).kernel


def test_any_two_factors_meet_in_six_servers() -> None:
    assert len(COVER) <= 8
    assert missing_pairs(COVER) == []
    for row in COVER:  # and none is there for nothing
        assert missing_pairs(tuple(other for other in COVER if other is not row))


def test_every_row_is_served_as_it_says_on_an_h200() -> None:
    names = {Mode.TARGET_VERIFY: "target_verify", Mode.DRAFT_DECODE: "draft_decode", Mode.DRAFT_EXTEND: "draft_extend"}
    for row in COVER + EXTRA:
        for mode, name in names.items():
            assert (kernel(row, mode) != "stock") == (name in row.served), (row.name, name)


def test_the_rows_reach_every_tree_kernel() -> None:
    trees = [row for row in COVER + EXTRA if row.shape == "tree"]
    assert {kernel(row, Mode.TARGET_VERIFY) for row in trees} >= {"fused", "prefix_tile", "prefix_gather"}
    # What a server gets unasked with a cache of the model's type, and with an FP8 one.
    assert [kernel(row, Mode.TARGET_VERIFY) for row in COVER[:2]] == ["specialized", "prefix_tile"]
    assert COVER[0].flags == COVER[1].flags == {}
    assert {row.base for row in trees} == {"fa3", "triton"}


def test_rows_over_two_gpus_differ_from_those_on_one_in_that_alone() -> None:
    one = (COVER[0], replace(TENSOR_PARALLEL[1], options=()))
    for row, alone in zip(TENSOR_PARALLEL, one, strict=True):
        assert arguments(row, REAL, MODELS, GPU) == arguments_with(alone, "--tp-size", "2")
    assert all("--tp-size" not in arguments(row, REAL, MODELS, GPU) for row in with_references(TENSOR_PARALLEL)[:3])


def arguments_with(row: Row, *more: str) -> list[str]:
    return arguments(replace(row, options=more), REAL, MODELS, GPU)


@pytest.mark.parametrize("rows", [COVER + EXTRA, DRY], ids=["gpu", "dry"])
def test_references_come_first_and_once(rows: tuple[Row, ...]) -> None:
    whole = with_references(rows)
    names = [row.name for row in whole]
    assert len(names) == len(set(names))
    for row in rows:
        assert names.index(row.name) > max(names.index(row.baseline), names.index(row.stock))
    by_name = {row.name: row for row in whole}
    for row in rows:
        assert (by_name[row.stock].shape, by_name[row.stock].cache, by_name[row.stock].base) == (row.shape, row.cache, row.base)
        assert by_name[row.baseline].cache == row.cache and not by_name[row.stock].flags
    assert any(row.faults and not row.graphs for row in rows), "a captured graph does not see a fault"


def test_factors_reach_the_command_line() -> None:
    for name, values in FACTORS.items():
        lines = [arguments(replace(COVER[0], **{name: value}), REAL, MODELS, GPU) for value in values]  # type: ignore[arg-type]
        assert lines[0] != lines[1], name
    assert "--attention-backend" not in arguments(COVER[0], REAL, MODELS, GPU)
    for row in with_references(COVER)[:2]:
        line = arguments(row, REAL, MODELS, GPU)
        assert not any("speculative" in text for text in line)
        assert line[line.index("--attention-backend") + 1] == "fa3"


def test_a_difference_counts_by_its_margin() -> None:
    tally = Tally()
    assert tally.add([5, 6, 7, 8], WANT, 0.25, length=4, what="a") == "equal"
    assert tally.add([5, 9, 9, 9], WANT, 0.25, length=4, what="b") == "undecided"
    assert tally.add([5, 6, 9, 8], WANT, 0.25, length=4, what="c") == "wrong"
    assert tally.add([5, 6], WANT, 0.25, length=4, what="too short") == "wrong"
    assert tally.add([5, 6], WANT, 0.25, length=None, what="cut off") == "equal"
    assert tally.add([5, 6, 7, 8, 9], WANT, 0.25, length=4, what="too long") == "wrong"
    assert tally.add([5, 6, 7, 8, 9], WANT, 0.25, length=None, what="cut off late") == "equal"
    assert (tally.runs, tally.compared, tally.undecided, tally.wrong) == (7, 4 + 1 + 2 + 2 + 2 + 4 + 4, 1, 3)
    assert [wrong["at"] for wrong in tally.first_wrong] == [2, 2, 5]
    assert tally.widest_undecided == 0.1
    assert "3 of 7 runs" in serving_judge.tally_problems(tally)[0]


def test_too_little_compared_is_a_failure() -> None:
    assert serving_judge.tally_problems(Tally())
    assert serving_judge.tally_problems(Tally(runs=4, tokens=100, compared=29, undecided=4))
    assert not serving_judge.tally_problems(Tally(runs=4, tokens=100, compared=31, undecided=4))


def test_noise_of_an_fp8_cache_is_measured_and_never_below_the_types() -> None:
    measured = serving_judge.largest_difference([[1.0, 2.0], [3.0]], [[1.1, 1.5], [3.0]])
    assert measured == 0.5
    assert serving_judge.noise_of("fp8_e4m3", "bfloat16", measured) == 1.0
    assert serving_judge.noise_of("fp8_e4m3", "bfloat16", 0.01) == 0.5
    assert serving_judge.noise_of("bf16", "bfloat16", 9.0) == 0.25


def answers(*steps: int, tokens: int = 12) -> list[Answer]:
    return [Answer([number] * tokens, {"spec_verify_ct": count}, []) for number, count in enumerate(steps)]


def test_accept_lengths_are_compared_where_tokens_are_equal() -> None:
    assert serving_judge.accept_problem(serving_judge.accept_lengths(answers(3, 4, 3), answers(3, 4, 3))) is None
    worse = serving_judge.accept_lengths(answers(4, 5, 4), answers(3, 4, 3))
    assert worse["standard error"] == 0.0
    assert "accept length 2.769, the stock backend's 3.600" in str(serving_judge.accept_problem(worse))
    other = answers(9, 4, 3)
    other[0].tokens[5] += 1
    unequal = serving_judge.accept_lengths(other, answers(3, 4, 3))
    assert unequal["comparable requests"] == pytest.approx(2 / 3)
    assert unequal["comparable"] == pytest.approx(24 / 7)
    assert serving_judge.accept_problem(unequal) is None
    for answer in other:
        answer.tokens[0] += 1
    assert "0% of requests" in str(serving_judge.accept_problem(serving_judge.accept_lengths(other, answers(3, 4, 3))))
    assert serving_judge.accept_problem(serving_judge.accept_lengths(answers(0), answers(0)))


def test_a_spread_of_one_step_is_no_worse_accept_length() -> None:
    mine, theirs = answers(4, 3, 4, 3, 4, 4), answers(3, 4, 4, 4, 3, 3)
    lengths = serving_judge.accept_lengths(mine, theirs)
    assert abs(lengths["comparable"] / lengths["stock, comparable"] - 1) > serving_judge.ACCEPT_BOUND
    assert serving_judge.accept_problem(lengths) is None


def route(mode: str, kernel: str, calls: int) -> dict[str, Any]:
    return {"part": "target", "mode": mode, "layer": "full attention", "kernel": kernel, "reason": "", "calls": calls}


def test_a_served_mode_must_have_run_on_kernels_of_the_plugin_alone() -> None:
    row = Row("row", "plugin", served=("target_verify", "draft_decode"))
    good = [route("target_verify", "prefix_tile", 4), route("target_verify", "fused", 2), route("draft_decode", "fused", 9)]
    assert serving_judge.kernel_problems(row, serving_judge.kernels_of(good)) == []
    for bad in ([route("target_verify", "stock", 1)], [route("draft_decode", "stock", 3)]):
        assert serving_judge.kernel_problems(row, serving_judge.kernels_of([*good, *bad]))
    never = [route("target_verify", "fused", 0), good[2]]
    assert serving_judge.kernel_problems(row, serving_judge.kernels_of(never)) == ["target_verify ran on nothing"]


def test_paths_must_leave_the_first_branch() -> None:
    tree, chain = Row("tree", "plugin"), Row("chain", "plugin", shape="chain")
    first, other, shallow = ([[0, 0, 0], []], [[0, 1]], [[1], [3]])
    assert serving_judge.path_problems(tree, serving_judge.paths_summary(first))
    assert serving_judge.path_problems(tree, serving_judge.paths_summary(shallow))
    assert not serving_judge.path_problems(tree, serving_judge.paths_summary(other))
    assert not serving_judge.path_problems(chain, serving_judge.paths_summary(first))


@pytest.mark.parametrize(
    "line",
    ["Traceback (most recent call last):", "ValueError: pool memory leak detected! [full]", "KV double free: sub-pool 0",
     "[2026-01-01 00:00:00] ERROR in scheduler", "Scheduler hit an exception: "],
)  # fmt: skip
def test_trouble_is_seen_in_a_log(line: str) -> None:
    assert TROUBLE.search(line)
    assert not TROUBLE.search("server_args=ServerArgs(enable_memory_saver=False, error_mode='x', log_level='info')")


def test_mask_memory_is_held_to_its_bound() -> None:
    expected = serving_memory.full_mask_bytes(64, 64, 131072)
    assert expected == 537_133_056
    plugin = {"row": {"name": "plugin"}, "mask bytes": 64 * 64 * 64}
    stock = {"row": {"name": "stock"}, "mask bytes": expected}
    assert serving_memory.problems(plugin, stock, expected, has_gpu=True) == []
    for one, other in ((plugin | {"mask bytes": 1_000_000}, stock), (plugin | {"mask bytes": 0}, stock), (plugin, plugin)):
        assert serving_memory.problems(one, other, expected, has_gpu=True)
    assert serving_memory.problems(plugin | {"error": "x"}, stock, expected, has_gpu=True) == ["plugin: x"]


def test_a_load_has_every_kind_of_request_and_knows_its_length() -> None:
    source, wanted = random.Random(3), [Answer([5, 6, 5, 8] * 4, {}, [1.0] * 16)] * 5
    jobs = [servers_load.draw_job(source, number, wanted) for number in range(300)]
    assert set(Counter(job.kind for job in jobs)) == set(servers_load.KINDS)
    for job in jobs:
        length = servers_load.length_of(job, wanted[0])
        if job.kind == "stop token":
            assert (
                length is not None and wanted[0].tokens[length - 1] == job.stop and job.stop not in wanted[0].tokens[: length - 1]
            )
        elif job.kind in ("aborted", "disconnected"):
            assert length is None and job.leave >= 1
        else:
            assert length == job.limit <= (8 if job.kind == "short" else 16)


def test_what_an_idle_server_holds_is_seen() -> None:
    counts = {"counts": {"pool checks": 3}, "strict idle check": True, "request rows": 8, "free request rows": 8}
    rest = {"used beyond it": 0, "available": 100, "capacity": 100, **counts}
    assert endurance.rest_problems(rest, rest) == []
    bad: list[dict[str, Any]] = [{"used beyond it": 1}, {"free request rows": 7}, {"strict idle check": False}, {"counts": {}}]
    for change in bad:
        assert endurance.rest_problems(rest | change, rest)
    assert endurance.rest_problems(rest, rest | {"available": 99})
    held = {"torch allocated": 10 * 2**20}
    assert endurance.memory_problems(held, held, endurance.MOST_GROWTH) == []
    assert endurance.memory_problems(held, held, endurance.MOST_GROWTH + 1)
    assert endurance.memory_problems(held, {"torch allocated": 19 * 2**20}, 0)


def test_growth_is_counted_from_a_moment_on_and_by_either_account() -> None:
    load = servers_load.Load(None, [], [], 0.25, 4, seed=0)  # type: ignore[arg-type]
    assert load.growth(60) is None
    load.samples = [
        {"seconds": s, "torch reserved": r, "device": d} for s, r, d in ((5, 1, 1), (61, 7, 10), (90, 9, 10), (120, 8, 15))
    ]
    assert load.growth(60) == 5
    assert load.growth(0) == 14
    load.samples = [{key: value for key, value in sample.items() if key != "device"} for sample in load.samples]
    assert load.growth(60) == 2


def test_prompts_are_the_same_each_time_and_of_every_length() -> None:
    pool = serving_prompts.pool(60, 6000, seed=1)
    assert pool == serving_prompts.pool(60, 6000, seed=1)
    assert len(pool) == 60 and {1, 6000} <= {len(prompt) for prompt in pool}
    assert sum(len(prompt) < 100 for prompt in pool) >= 15
    prompts = serving_prompts.parity_prompts(48, 600)
    assert len({tuple(prompt) for prompt in prompts}) > 40 and max(map(len, prompts)) == 600
    assert len(serving_prompts.parity_prompts(4, 16)) == 4


def test_a_row_is_printed_with_what_failed() -> None:
    assert serving_judge.verdict({"problems": ["it did not start"]}) == "FAIL it did not start"


def test_ports_differ() -> None:
    assert len({reserve_port() for _ in range(20)}) == 20


def test_a_model_gets_the_heads_that_were_asked_for(tmp_path: Any) -> None:
    from safetensors import safe_open

    directory = serving_models.build("copy", tmp_path, "bfloat16", serving_models.REAL)
    with safe_open(directory / "model.safetensors", "pt") as weights:
        shapes = {name: weights.get_slice(f"model.layers.1.self_attn.{name}.weight").get_shape() for name in ("q_proj", "k_proj")}
    assert shapes == {"q_proj": [4096, 256], "k_proj": [1024, 256]}
    from sglang_specverify.demo import models

    assert (models.Q_HEADS, models.HEAD_DIM) == (8, 32)
