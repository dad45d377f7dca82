"""The step's metadata: parts that cover each prefix once and fit their buffers, counters at 0, masks as bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import (
    plan_verify_attention,
    prepare_step,
    verify_attention,
    verify_attention_workspace_size,
)
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.plan import ALIGN, DETERMINISTIC_CHUNK, MAX_CTAS_PER_SM, Plan, Shape
from sglang_specverify.kernels.table_schema import BLOCKS
from tests.kernels.cases import Config

from .calls import check, launches, names, to_device
from .plans import attends, counters, items, plan_for, rested
from .strategies import draft_call, verify_call

GUARD = 0x5A5A5A5A

#: Up to the longest contexts served, in requests of very different lengths.
LENGTHS = st.one_of(st.integers(0, 600), st.integers(0, 20_000), st.sampled_from([0, 1, 127, 128, 129, 256, 257, 2**20]))


def make(lens: list[int], device: str, **options: Any) -> tuple[Plan, torch.Tensor]:
    """A plan over a buffer full of guards, and that buffer, which is 64 entries longer."""
    prefix_lens = torch.tensor(lens, dtype=torch.int64 if len(lens) % 2 else torch.int32, device=device)
    row_ids = torch.arange(len(lens), dtype=torch.int32, device=device).flip(0)
    shape = {"num_draft_tokens": 4, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "divide": True} | options
    need = plan_verify_attention(prefix_lens, row_ids, **shape).words
    buffer = torch.full((need + 64,), GUARD, dtype=torch.int32, device=device)
    with launches() as seen:
        plan = plan_verify_attention(prefix_lens, row_ids, **shape, out=buffer[:need])
    assert names(seen) == ["plan_kernel"] * (len(lens) > 0)
    assert (buffer[need:] == GUARD).all(), "written past the buffer"
    return plan, buffer


def check_parts(plan: Plan, lens: list[int], window: int) -> dict[int, int]:
    """Every prefix, from the window of its first row on, is covered once and in order; gives the parts of each request."""
    words = items(plan).tolist()
    parts: dict[int, list[list[int]]] = {}
    for word in words:
        if word[0] >= 0:
            parts.setdefault(word[0], []).append(word)
    used = sum(map(len, parts.values()))
    assert all(word[0] == -1 for word in words[used:]), "unused items stand at the end"
    assert sorted(parts) == list(range(len(lens))), "each request has a part, for its drafts"
    slots: list[int] = []
    for r, n in enumerate(lens):
        own = parts[r]
        assert [word[3] for word in own] == list(range(len(own)))
        assert {word[4] for word in own} == {len(own)}
        first = own[0][1]
        assert first == 0 if window < 0 else first <= max(0, n - window)
        assert first % ALIGN == 0 and own[-1][2] == n
        for one, after in itertools.pairwise(own):
            assert one[2] == after[1] and one[2] % ALIGN == 0
        assert all(word[1] < word[2] for word in own) or n == first
        if len(own) > 1:
            slots += range(own[0][5], own[0][5] + len(own))
    assert len(slots) == len(set(slots)) and all(slot < plan.shape.partials(plan.batch) for slot in slots)
    assert counters(plan).tolist() == rested(plan)
    return {r: len(own) for r, own in parts.items()}


@given(
    lens=st.lists(LENGTHS, min_size=1, max_size=7),
    window=st.sampled_from([-1, -1, 0, 100, 1000]),
    programs=st.sampled_from([1, 3, 8, 33, 264]),
    kv_heads=st.sampled_from([1, 2, 8]),
    width=st.sampled_from([1, 4, 64]),
    deterministic=st.booleans(),
)
def test_parts(device: str, lens: list[int], window: int, programs: int, kv_heads: int, width: int, deterministic: bool) -> None:
    options = {"q_heads": 8, "kv_heads": kv_heads, "num_draft_tokens": width, "deterministic": deterministic}
    plan, _ = make(lens, device, window=window, programs=programs, **options)
    parts = check_parts(plan, lens, window)
    if deterministic:
        alone, _ = make(lens[:1], device, window=window, programs=programs + 7, **options)
        assert check_parts(alone, lens[:1], window)[0] == parts[0], "the split follows the request's own length"


@pytest.mark.parametrize("batch", [1, 17, 100, 1024])
@pytest.mark.parametrize("deterministic", [False, True])
def test_batches(device: str, batch: int, deterministic: bool) -> None:
    if device == "cpu" and batch > 17:
        batch = 3 * batch // 64 + 33  # the interpreter takes 20 ms a request
    lens = [(i * 7919) % 3000 for i in range(batch)]
    plan, _ = make(lens, device, deterministic=deterministic, programs=264)
    check_parts(plan, lens, -1)


def test_long_prefixes_fill_the_programs(device: str) -> None:
    """One request alone is divided into about as many parts as there are programs for it, short ones not at all."""
    plan, _ = make([100_000], device, programs=64)
    assert 16 <= check_parts(plan, [100_000], -1)[0] <= 33
    plan, _ = make([100] * 8, device, programs=64)
    assert set(check_parts(plan, [100] * 8, -1).values()) == {1}


def test_deterministic_parts_are_of_a_fixed_length(device: str) -> None:
    lens = [DETERMINISTIC_CHUNK, DETERMINISTIC_CHUNK + 1, 4 * DETERMINISTIC_CHUNK, 10**6]
    plan, _ = make(lens, device, deterministic=True, num_draft_tokens=1)
    assert check_parts(plan, lens, -1) == {0: 1, 1: 2, 2: 4, 3: plan.shape.max_splits}


@pytest.mark.parametrize("w", [1, 33, 64, 70, 130])
@pytest.mark.parametrize("prefix_lens", [(3, 40, 0), (64, 63, 129)])
@pytest.mark.parametrize("kind", ["qlen_only", "full_mask", "ragged"])
def test_masks_as_bits(device: str, kind: str, prefix_lens: tuple[int, ...], w: int) -> None:
    """Words begin at the prefix's last multiple of 64, whose keys are visible; bit 63, whose word is negative; none past W."""
    widths = (w, 0, max(1, w // 2)) if kind == "ragged" else w
    c = Config(seed=w, prefix_lens=prefix_lens, widths=widths, kind="qlen_only" if kind == "qlen_only" else "full_mask",
               mask_dtype=torch.uint8, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)  # fmt: skip
    a = to_device(verify_call(c), device)
    options = {name: a.get(name) for name in ("mask", "mask_layout", "mask_offsets", "q_offsets")}
    rows = len(a["q"]) if kind == "ragged" else None
    plan, _ = make(list(prefix_lens), device, **options, num_draft_tokens=w, num_rows=rows, divide=bool(w % 2))
    assert plan.bits is not None and plan.seen is not None and plan.tree is not None
    shifts = torch.arange(64, device=device)
    bits = ((plan.bits.view(-1, plan.tree.words, 1) >> shifts) & 1).flatten(1) != 0
    seen = plan.seen.view(len(prefix_lens), -1) != 0
    start = at = 0
    for r, (n, count) in enumerate(zip(c.prefix_lens, c.row_counts, strict=True)):
        if kind == "qlen_only":
            want = a["mask"][r] != 0
        else:
            want = a["mask"][at : at + count * (n + count)].view(count, n + count)[:, n:] != 0
            at += count * (n + count)
        got, before = bits[start : start + count], n % 64
        assert got[:, :before].all() and torch.equal(got[:, before : before + count], want)
        assert not got[:, before + count :].any(), "a bit past W"
        if count:
            assert torch.equal(seen[r], got.any(0))
        start += count


KINDS = ["chain", "qlen_only", "full_mask", "branches"]


def build(kind: str, device: str, lens: tuple[int, ...]) -> dict[str, Any]:
    c = Config(seed=1, prefix_lens=lens, widths=3, kind=kind, q_heads=2, kv_heads=1, head_dim=16, v_head_dim=32, page_size=16,
               q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)  # fmt: skip
    return to_device(draft_call(c, 3, 1, 2) if kind == "branches" else verify_call(c), device)


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_with_a_plan(device: str, kind: str, divide: bool) -> None:
    """The plan launches once, each call after it attention and what combines, and a divided call runs divided."""
    a = build(kind, device, (700, 30))
    plan = plan_for(a, divide=divide)
    for _ in range(2):
        with launches() as seen:
            check(a, variant="auto", plan=plan, splits=8)
        assert names(seen) == attends(plan) and seen[0].constants["SPLIT"] is divide
    if divide:
        assert items(plan)[0, 4] > 1, "the prefix of 700 is not divided, and this test shows nothing"


@pytest.mark.parametrize("kind", ["qlen_only", "full_mask"])
def test_plan_of_new_lengths_and_masks_in_the_same_buffer(device: str, kind: str) -> None:
    """A replay: the same addresses hold other lengths and masks, and only the metadata launch runs again."""
    a = build(kind, device, (700, 30))
    plan = plan_for(a, divide=True)
    check(a, variant="fused_split", plan=plan, splits=8)
    b = build(kind, device, (40, 690))
    for name in ("q", "k_cache", "v_cache", "table"):
        a[name] = b[name]
    a["prefix_lens"].copy_(b["prefix_lens"])
    a["row_ids"].copy_(b["row_ids"])
    a["positions"].copy_(b["positions"])
    if kind == "full_mask":
        a["mask"] = b["mask"]
        a["mask_offsets"].copy_(b["mask_offsets"])
    else:
        a["mask"].copy_(b["mask"].flip(0))
    again = plan_for(a, divide=True, out=plan.buffer)
    assert again.buffer is plan.buffer
    check(a, variant="fused_split", plan=again, splits=8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_divides_nothing_serves_every_window(device: str, kind: str) -> None:
    a = build(kind, device, (700, 30))
    plan = plan_for(a, divide=False, window=200)
    for window in (-1, 0, 90, 200):
        with launches() as seen:
            check({**a, "window": window}, variant="auto", plan=plan)
        assert names(seen) == ["verify_attention_kernel"] and not seen[0].constants["SPLIT"]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_undivided_for_layers_of_other_windows(device: str, kind: str, deterministic: bool) -> None:
    """Full layers run divided and window layers not, on one buffer; what fills it anew serves both."""
    a = build(kind, device, (700, 30)) | {"deterministic": deterministic}
    whole = plan_for(a, divide=True)
    plan = whole.undivided()
    assert plan.undivided() is plan and not plan.divides
    if kind in ("qlen_only", "full_mask"):
        assert plan.bits is not None and plan.seen is not None and whole.bits is not None and whole.seen is not None
        assert plan.bits.data_ptr() == whole.bits.data_ptr() and len(plan.bits) == len(whole.bits)
        assert plan.seen.data_ptr() == whole.seen.data_ptr() and len(plan.seen) == len(whole.seen)
    b = build(kind, device, (40, 690)) | {"deterministic": deterministic}
    for call in (a, b):
        assert plan_for(call, divide=True, out=whole.buffer).words == whole.words
        check(call, variant="auto", plan=whole, splits=16)
        for window in (-1, 60):
            check({**call, "window": window}, variant="auto", plan=plan)
    with launches() as seen, pytest.raises(ArgumentError, match="plan: got"):
        check({**a, "window": 60}, variant="auto", plan=whole)
    assert not seen


def test_deterministic_plans_that_divide_nothing_need_no_scratch(device: str) -> None:
    """More than 256 rows of a KV head, of a prefix that fewer rows would divide."""
    config, sizes = LaunchConfig(block_m=128, block_n=128, num_warps=4, num_stages=1), {}
    for width in (128, 129):
        c = Config(
            seed=2, prefix_lens=(1100,), widths=width, q_heads=2, head_dim=16, v_head_dim=16, q_dtype=torch.bfloat16,
            cache_dtype=torch.bfloat16,
        )  # fmt: skip
        a = to_device(verify_call(c), device) | {"deterministic": True}
        plan = plan_for(a, config=config)
        sizes[width] = plan.shape.workspace_bytes(plan.batch)
        assert max(check_parts(plan, [1100], -1).values()) == (2 if width == 128 else 1)
    assert sizes[128] > 0 and sizes[129] == 0
    for workspace in (None, torch.empty(0, dtype=torch.uint8, device=device)):
        check(a, variant="auto", plan=plan, workspace=workspace)


def test_undivided_launches_as_a_plan_that_divides_nothing(device: str) -> None:
    a = build("chain", device, (700, 30))
    assert plan_for(a, divide=True).undivided().shape.config == plan_for(a, divide=False).shape.config
    config = LaunchConfig(block_m=16, block_n=32, num_warps=4, num_stages=1)
    assert plan_for(a, divide=True, config=config).undivided().shape.config == config


def test_a_plan_of_another_call_is_refused(device: str) -> None:
    a = build("chain", device, (700, 30))
    plan = plan_for(a, divide=True)
    for change in ({"num_draft_tokens": 2}, {"window": 5}, {"q_heads": 4}, {"v_head_dim": 16}, {"deterministic": True}):
        other = plan_for(a, divide=True, **change)
        with launches() as seen, pytest.raises(ArgumentError, match="plan: got"):
            check(a, variant="fused_split", plan=other)
        assert not seen
    for change in (
        {"dtype": torch.float32},
        {"cache_dtype": torch.float8_e4m3fn},
        {"page_size": 64},
        {"head_dim": 80},
        {"branches": True},
    ):
        with pytest.raises(ArgumentError, match=r"plan: got a plan made for .*kind, ragged"):
            check(a, variant="fused_split", plan=plan_for(a, divide=True, **change))
    fewer = plan_for({**a, "prefix_lens": a["prefix_lens"][:1], "row_ids": a["row_ids"][:1]}, divide=True)
    with pytest.raises(ArgumentError, match="plan: got"):
        check(a, variant="fused_split", plan=fewer)
    size = plan.shape.workspace_bytes(2)
    for bad in (
        torch.zeros(size - 1, dtype=torch.uint8, device=device),
        torch.zeros(size, dtype=torch.int8, device=device),
        torch.zeros(2 * size, dtype=torch.uint8, device=device)[::2],  # there: a copy to a device would be dense
    ):
        with pytest.raises(ArgumentError, match="workspace"):
            check(a, variant="fused_split", plan=plan, workspace=bad)


def test_a_plan_of_even_rows_is_refused_by_ragged_ones(device: str) -> None:
    """The same number of rows in all, divided otherwise over the requests: the masks are packed by request."""
    a = build("full_mask", device, (30, 9))
    rows = a["num_draft_tokens"]
    plan = plan_for(a, divide=False)
    ragged = torch.tensor([0, rows - 1, 2 * rows - 1], dtype=torch.int32, device=device)
    with launches() as seen, pytest.raises(ArgumentError, match=r"plan: got a plan made for .*kind, ragged"):
        verify_attention(**{**a, "q_offsets": ragged}, variant="fused", plan=plan)
    assert not seen


def _refusals(device: str) -> list[tuple[str, dict[str, Any]]]:
    """The argument that an error must name, and what to change in a plan of two requests of four rows."""
    offsets = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    masked = {"mask": torch.ones(56, dtype=torch.bool, device=device), "mask_layout": "full_mask"}
    masked["mask_offsets"] = torch.tensor([0, 28, 56], device=device)
    square = torch.ones(2, 4, 4, dtype=torch.bool, device=device)
    found: list[tuple[str, dict[str, Any]]] = [
        ("num_rows", {"num_rows": 7}), ("num_rows", {"num_rows": 7, "mask": square}), ("num_rows", {"num_rows": -1}),
        ("num_rows", {"num_rows": 8.0, "q_offsets": offsets}), ("num_rows", {"num_rows": True}),
        ("num_rows", {"num_rows": -1, "q_offsets": offsets, **masked}), ("num_rows", {"q_offsets": offsets}),
        ("v_head_dim", {"v_head_dim": 0}), ("v_head_dim", {"v_head_dim": -4}), ("v_head_dim", {"v_head_dim": "a"}),
        ("programs", {"programs": 0}), ("programs", {"programs": -5}), ("programs", {"programs": 1.5}),
        ("dtype", {"dtype": "bf16"}), ("dtype", {"dtype": torch.float64}), ("dtype", {"dtype": torch.float8_e4m3fn}),
        ("cache_dtype", {"cache_dtype": "fp8"}), ("cache_dtype", {"cache_dtype": torch.int8}),
        ("divide", {"divide": 1}), ("deterministic", {"deterministic": None}), ("branches", {"branches": "no"}),
        ("config", {"config": {"block_m": 16}}), ("mask", {"mask": "x"}), ("mask", {"mask": square[:, :3]}),
        ("mask_layout", {"mask": square, "mask_layout": "square"}), ("mask_offsets", {**masked, "mask_offsets": None}),
    ]  # fmt: skip
    if device == "cpu":
        found += [
            ("num_rows", {"num_rows": 7, "q_offsets": offsets, **masked}), ("num_rows", {"num_rows": 0, "q_offsets": offsets}),
            ("q_offsets", {"num_rows": 8, "q_offsets": offsets.flip(0)}),
            ("q_offsets", {"num_rows": 9, "q_offsets": offsets + offsets // 8}),
            ("q_offsets", {"num_rows": 8, "q_offsets": offsets - 4}),
            ("prefix_lens", {"prefix_lens": torch.tensor([3, -3])}), ("row_ids", {"row_ids": torch.tensor([0, -1]).int()}),
            ("mask", {**masked, "mask": masked["mask"][:55]}),
            ("mask_offsets", {**masked, "mask_offsets": torch.tensor([0, 27, 56])}),
            ("mask_offsets", {**masked, "mask_offsets": torch.tensor([-1, 28, 56])}),
        ]  # fmt: skip
    return found


@pytest.mark.parametrize("empty", [False, True], ids=["", "idle"])
@pytest.mark.parametrize("divide", [False, True])
def test_refusals_name_the_argument_and_come_before_the_launch(device: str, divide: bool, empty: bool) -> None:
    """`prepare_step` refuses the same; without a request whatever says nothing of one."""
    lens, rows = torch.tensor([3, 3], device=device), torch.arange(2, dtype=torch.int32, device=device)
    good: dict[str, Any] = {"num_draft_tokens": 4, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "divide": divide}
    good |= {"prefix_lens": lens, "row_ids": rows}
    whole: dict[str, Any] = {"num_draft_tokens": "x", "head_dim": 0, "q_heads": 3, "window": -2, "page_size": 0}
    always = {"v_head_dim", "programs", "dtype", "cache_dtype", "divide", "deterministic", "branches", "config", "mask_layout"}
    cases = [*_refusals(device), *((name, {name: value}) for name, value in whole.items())]
    if empty:
        good |= {"prefix_lens": lens[:0], "row_ids": rows[:0]}
        cases = [(name, change) for name, change in cases if name in always | set(whole) or change.get("mask") == "x"]
    pool = torch.arange(64, dtype=torch.int32, device=device).view(2, 32)
    table = torch.full((2, 16), GUARD, dtype=torch.int32, device=device)
    for name, change in cases:
        buffer = torch.full((4096,), GUARD, dtype=torch.int32, device=device)
        a = {**good, **change, "out": buffer}
        with launches() as seen, pytest.raises(ArgumentError, match=f"^{name}: got .*; allowed: ") as caught:
            plan_verify_attention(**a)
        assert caught.value.argument == name and not seen and bool((buffer == GUARD).all()), change
        if name == "row_ids":
            continue
        ids = a.pop("row_ids")
        with launches() as seen, pytest.raises(ArgumentError) as caught:
            prepare_step(pool, ids, **a, table=table, extra=4)
        assert caught.value.argument == name and not seen and bool((table == GUARD).all()), change


@pytest.mark.parametrize("name", ["prefix_lens", "row_ids", "q_offsets", "mask_offsets"])
def test_strided_arguments_are_refused(device: str, name: str) -> None:
    """They are read as neighbours."""
    a = build("full_mask", device, (30, 9))
    values = {**a, "q_offsets": torch.tensor([0, 1, 2], dtype=torch.int32, device=device)}
    values[name] = values[name].repeat_interleave(2)[::2]
    with launches() as seen, pytest.raises(ArgumentError, match=f"{name}: got strides"):
        plan_for(values)
    assert not seen


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_heads": 3}, "q_heads: got 8 for 3 KV heads"),
        ({"multiprocessors": "x"}, "multiprocessors: got 'x'; allowed: an int of at least 1"),
        ({"multiprocessors": 0}, "multiprocessors: got 0"),
        ({"deterministic": 1}, "deterministic: got 1; allowed: True or False"),
    ],
)
def test_workspace_size_refuses_what_is_no_size(change: dict[str, Any], says: str) -> None:
    sizes: dict[str, Any] = {"num_draft_tokens": 4, "q_heads": 8, "kv_heads": 2, "v_head_dim": 64, "multiprocessors": 1}
    with pytest.raises(ArgumentError, match=says):
        verify_attention_workspace_size(1, **(sizes | change))


@given(
    batch=st.integers(0, 40),
    width=st.integers(1, 256),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.integers(1, 16),
    dim=st.sampled_from([16, 64, 80, 128, 256]),
    deterministic=st.booleans(),
)
def test_workspace_size_is_enough_and_monotone(
    batch: int, width: int, kv_heads: int, group: int, dim: int, deterministic: bool
) -> None:
    """At least what a plan for these sizes needs, and no smaller for anything larger."""
    sizes = {"batch": batch, "num_draft_tokens": width, "q_heads": kv_heads * group, "kv_heads": kv_heads, "v_head_dim": dim}

    def size(**changes: int) -> int:
        values = sizes | changes
        first = values.pop("batch")
        return verify_attention_workspace_size(first, **values, deterministic=deterministic, multiprocessors=132)

    base = size()
    assert base <= min(size(batch=batch + 1), size(num_draft_tokens=width + 1), size(v_head_dim=dim + 16))
    assert base <= size(q_heads=kv_heads * (group + 1))
    assert base <= size(q_heads=kv_heads * 2 * group, kv_heads=2 * kv_heads)
    for block in BLOCKS:  # any table may hold any of them: matrix units that want 64 rows make it worth having few of them
        shape = Shape(width * group, kv_heads, dim, LaunchConfig(block, 64, 4, 2), 132 * MAX_CTAS_PER_SM, deterministic)
        assert shape.workspace_bytes(batch) <= base, block


def test_workspace_fits_the_default_budget() -> None:
    """256 MB for the largest graph of a served model: bs 64, W 128, 32 heads over 8, D 128."""
    size = verify_attention_workspace_size(64, num_draft_tokens=128, q_heads=32, kv_heads=8, v_head_dim=128, multiprocessors=132)
    assert size <= 256 * 2**20
