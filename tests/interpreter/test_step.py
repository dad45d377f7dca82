"""A step in one launch: the copies of `snapshot_table` and the buffer of `plan_verify_attention`, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import metadata
from benchmarks.points import Point
from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import plan_verify_attention, prepare_step, snapshot_table, step
from sglang_specverify.kernels.plan import Masks, Plan
from tests.kernels.cases import Config, build_verify, generator

from .calls import check, launches, names, to_device
from .plans import attends, layers_of

GUARD = 0x5A5A5A5A
INTS = [torch.int32, torch.int64]
KINDS = ["chain", "ragged chain", "qlen_only", "full_mask", "ragged full_mask", "branches"]


def build(
    kind: str, lens: tuple[int, ...], w: int, device: str, *, seed: int = 0, page_size: int = 1, context: int = 0,
    slot_map: bool = False, types: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.int32, torch.int64, torch.int64),
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `prepare_step` but the tables: an engine's table on shuffled pages with garbage behind each request's end."""
    gen = generator(seed)
    counts = torch.full((len(lens),), 0 if kind == "branches" else w)
    if kind.startswith("ragged"):
        counts = torch.randint(0, w + 1, (len(lens),), generator=gen)
    ends = [n + int(count) for n, count in zip(lens, counts, strict=True)]
    context = context or max([*ends, 1]) + 5
    per_row = -(-context // page_size)
    pages = torch.randperm(max(1, len(lens)) * per_row, generator=gen).view(-1, per_row)
    rows = torch.randperm(len(lens) + 3, generator=gen)[: len(lens)]
    table = torch.randint(-(2**31), 2**31, (len(lens) + 3, context), generator=gen)
    for r, end in enumerate(ends):
        table[rows[r], :end] = (pages[r, :, None] * page_size + torch.arange(page_size)).flatten()[:end]
    a: dict[str, Any] = {
        "req_to_token": table.to(types[0]), "req_pool_indices": rows.to(types[1]),
        "prefix_lens": torch.tensor(lens, dtype=types[2]), "page_size": page_size, "extra": 0 if kind == "branches" else w,
        "num_draft_tokens": w, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "branches": kind == "branches", **options,
    }  # fmt: skip
    if slot_map:
        moved = torch.randperm(pages.numel(), generator=gen)[:, None] * page_size + torch.arange(page_size)
        a["slot_map"] = moved.flatten().to(types[1])
    if kind.startswith("ragged"):
        a |= {"q_offsets": torch.tensor([0, *counts]).cumsum(0).int(), "num_rows": int(counts.sum()) + 3}
    if kind == "qlen_only":
        a["mask"] = torch.rand(len(lens), w, w, generator=gen) < 0.4
    elif kind.endswith("full_mask"):
        sizes = torch.tensor([0, *(int(c) * (n + int(c)) for n, c in zip(lens, counts, strict=True))]).cumsum(0)
        bits = torch.rand(int(sizes[-1]) + 7, generator=gen) < 0.4
        a |= {"mask": bits.to(torch.uint8) * 0x80, "mask_layout": "full_mask", "mask_offsets": sizes}
    return to_device(a, device)


TABLE = ("req_to_token", "req_pool_indices", "slot_map", "extra")


def guarded(rows: int, width: int, device: str, *, aligned: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Guards, and a table inside of them; `aligned`: whose rows begin at multiples of 16 entries."""
    left = 16 if aligned else 2
    whole = -(-(width + 2 * left) // 16) * 16 if aligned else width + 2 * left
    base = torch.full((rows + 2, whole), GUARD, dtype=torch.int32, device=device)
    return base, base[1:-1, left : left + width]


def buffer(words: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.full((words + 64,), GUARD, dtype=torch.int32, device=device)
    return base, base[32 : 32 + words]


def assert_step(a: dict[str, Any], device: str, *, spare: int = 1, aligned: bool = False) -> Plan:
    """One launch leaves in guarded tables and a guarded plan what the two operations leave there."""
    batch, context = len(a["prefix_lens"]), a["req_to_token"].shape[1]
    width, mapped = -(-context // a["page_size"]) + 2, a.get("slot_map")
    layers = {name: value for name, value in a.items() if name not in TABLE and name != "prefix_lens"}
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    blank = plan_verify_attention(a["prefix_lens"], rows, **layers)
    plans = [buffer(blank.words, device) for _ in range(2)]
    tables = [guarded(batch + spare, width, device, aligned=aligned) for _ in range(4)]

    more = a["extra"] if a.get("q_offsets") is None else a["q_offsets"].diff()
    source = {"req_to_token": a["req_to_token"], "req_pool_indices": a["req_pool_indices"], "page_size": a["page_size"]}
    snapshot_table(**source, seq_lens=a["prefix_lens"] + more, out=tables[0][1])
    if mapped is not None:
        snapshot_table(**source, seq_lens=a["prefix_lens"] + more, slot_map=mapped, out=tables[1][1])
    plan_verify_attention(a["prefix_lens"], rows, **layers, out=plans[0][1])
    inputs = {name: value.clone() for name, value in a.items() if isinstance(value, torch.Tensor)}
    with launches() as seen:
        plan = prepare_step(
            **a, table=tables[2][1], window_table=None if mapped is None else tables[3][1], out=plans[1][1]
        )  # fmt: skip
    assert names(seen) == ["prepare_step_kernel"] * (batch > 0), "one launch"
    assert torch.equal(tables[0][0], tables[2][0]), "table"
    assert torch.equal(tables[1][0], tables[3][0]), "window table"
    assert torch.equal(plans[0][0], plans[1][0]), "plan"
    assert plan.buffer is plans[1][1] and (plan.shape, plan.tree, plan.call) == (blank.shape, blank.tree, blank.call)
    assert all(torch.equal(a[name], value) for name, value in inputs.items()), "an input was written"
    return plan


@given(
    kind=st.sampled_from(KINDS),
    lens=st.lists(st.sampled_from([0, 1, 17, 63, 64, 65, 300, 700]), min_size=1, max_size=4).map(tuple),
    w=st.sampled_from([1, 4, 33, 70]),
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 1, 4, 64]),
    slot_map=st.booleans(),
    types=st.tuples(st.sampled_from(INTS), st.sampled_from(INTS), st.sampled_from(INTS)),
    window=st.sampled_from([-1, 100]),
    deterministic=st.booleans(),
    divide=st.sampled_from([None, True, False]),
    programs=st.sampled_from([None, 64]),
    spare=st.integers(0, 2),
)
def test_one_launch_does_what_two_do(device: str, kind: str, lens: tuple[int, ...], w: int, spare: int, **options: Any) -> None:
    assert_step(build(kind, lens, w, device, **options), device, spare=spare)


@pytest.mark.parametrize("w", [31, 32, 64, 65, 97, 128, 200, 256])
@pytest.mark.parametrize("kind", ["qlen_only", "ragged full_mask"])
def test_wide_trees(device: str, kind: str, w: int) -> None:
    """Blocks of rows and what they see together go to programs of their own; here each word of `seen` is found from the bits."""
    plan = assert_step(build(kind, (5, 64), w, device, seed=w), device)
    assert plan.bits is not None and plan.seen is not None and plan.tree is not None
    a = build(kind, (5, 64), w, device, seed=w)
    stops = torch.arange(3) * w if kind == "qlen_only" else a["q_offsets"].cpu()
    bits = ((plan.bits.view(-1, plan.tree.words, 1) >> torch.arange(64, device=device)) & 1).flatten(1)
    for r in range(2):
        own = bits[int(stops[r]) : int(stops[r + 1])]
        assert torch.equal(plan.seen.view(2, -1)[r].bool(), own.any(0))


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_longer_than_all_programs(device: str, programs: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copying program goes round for every block that falls to it: whole ones, a rest, none."""
    monkeypatch.setattr(step, "_BLOCK", 16)
    monkeypatch.setattr(step, "_PROGRAMS", 1)
    monkeypatch.setattr(step, "_ROW_PROGRAMS", programs)
    lens = (200, 0, 12, 15, 60, 61, 188, 189)
    for slot_map in (False, True):
        assert_step(build("chain", lens, 4, device, page_size=page_size, slot_map=slot_map), device)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("slot_map", [False, True])
def test_long_rows(device: str, slot_map: bool, aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the real size, several at once where a row has enough of them, with wide accesses and without."""
    monkeypatch.setattr(step, "_PROGRAMS", 1)
    monkeypatch.setattr(step, "_ROW_PROGRAMS", 2)
    lens = (20_000, 8188, 8189, 1020, 1021, 3000)
    a = build("chain", lens, 4, device, context=20_016 if aligned else 20_005, slot_map=slot_map, divide=False)
    assert_step(a, device, aligned=aligned)


@pytest.mark.parametrize(("batch", "width"), [(1, 1 << 20), (32, 131072), (1024, 1 << 20), (32, 8320), (1, 1)])
def test_programs_are_bounded(batch: int, width: int) -> None:
    """Short requests in a wide table: a bounded number of copying programs, whatever the width."""
    programs, blocks = step.copy_programs(batch, width), -(-width // step._BLOCK)
    assert min(blocks, step._ROW_PROGRAMS) <= programs <= blocks
    assert batch * programs <= max(2 * step._PROGRAMS, step._ROW_PROGRAMS * batch)


def test_no_request(device: str) -> None:
    assert_step(build("chain", (), 4, device), device)


def test_padded_requests(device: str) -> None:
    """Of four requests two are padding, of prefix 0 and of prefix 1 with row 0 of the pool: real ones are as alone."""
    a = build("qlen_only", (70, 9), 4, device)
    a["req_to_token"][0] = 0
    a["req_pool_indices"] += a["req_pool_indices"] == 0
    padded = {
        **a, "req_pool_indices": torch.cat([a["req_pool_indices"], a["req_pool_indices"].new_zeros(2)]),
        "prefix_lens": torch.cat([a["prefix_lens"], a["prefix_lens"].new_tensor([0, 1])]),
        "mask": torch.cat([a["mask"], torch.ones_like(a["mask"])]),
    }  # fmt: skip
    a["req_to_token"][a["req_pool_indices"][0], :74] = torch.arange(74, dtype=torch.int32, device=device)
    a["req_to_token"][a["req_pool_indices"][1], :13] = torch.arange(80, 93, dtype=torch.int32, device=device)
    plan = assert_step(padded, device)
    alone = assert_step(a, device)
    assert plan.bits is not None and alone.bits is not None
    assert torch.equal(plan.bits[: len(alone.bits)], alone.bits)


def call_through_a_step(c: Config, device: str, **options: Any) -> tuple[dict[str, Any], Plan, torch.Tensor | None]:
    """A call of `verify_attention` whose table is made by a step; the plan, and the step's table for window layers."""
    a = build_verify(c)
    rows, page = a["row_ids"].long(), c.page_size
    index = torch.arange(a["table"].shape[1] * page)
    pages = a["table"][:, index // page]
    a["req_to_token"] = torch.where(pages >= 0, pages * page + index % page, -1).int()
    mapped = a.pop("slot_map")
    a |= {"row_ids": torch.arange(len(rows), dtype=torch.int32), "rows": rows, "map": mapped}
    a["table"] = torch.full((len(rows) + 1, a["table"].shape[1]), -1, dtype=torch.int32)
    a = to_device(a, device)
    moved = None if mapped is None else torch.full_like(a["table"], -1)
    plan = prepare_step(
        a.pop("req_to_token"), a.pop("rows"), a["prefix_lens"], table=a["table"], slot_map=a["map"], window_table=moved,
        extra=c.row_counts[0], **layers_of(a), **options,
    )  # fmt: skip
    a["slot_map"] = a.pop("map")
    return a, plan, moved


@pytest.mark.parametrize("kind", ["chain", "qlen_only", "full_mask"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_layers_of_a_step(device: str, kind: str, page_size: int) -> None:
    """One launch serves full layers, divided, and window layers of two windows, undivided, each against FP64."""
    c = Config(seed=4, prefix_lens=(700, 30, 0), widths=5, kind=kind, q_heads=4, kv_heads=2, head_dim=32, v_head_dim=32,
               page_size=page_size, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)  # fmt: skip
    a, plan, _ = call_through_a_step(c, device, divide=True)
    with launches() as seen:
        check(a, variant="auto", plan=plan, splits=8)
        for window in (100, 3):
            check({**a, "window": window}, variant="auto", plan=plan.undivided())
    assert names(seen) == attends(plan) + 2 * attends(plan.undivided())
    own = [launch.constants for launch in seen if "SPLIT" in launch.constants]
    assert [constants["SPLIT"] for constants in own] == [True, False, False]


def test_window_layers_of_another_pool(device: str) -> None:
    """Their slots come translated in a table of their own, so the call takes no map."""
    c = Config(seed=5, prefix_lens=(300, 20), widths=4, kind="qlen_only", q_heads=2, kv_heads=1, head_dim=16, v_head_dim=16,
               slot_map=True, q_dtype=torch.float16, cache_dtype=torch.float16)  # fmt: skip
    a, plan, moved = call_through_a_step(c, device, divide=True)
    check(a, variant="auto", plan=plan, splits=8)
    assert moved is not None
    check({**a, "table": moved, "slot_map": None, "window": 50}, variant="auto", plan=plan.undivided())


@pytest.mark.parametrize("arm", ["ours", "two_launches"])
def test_what_the_benchmark_times(device: str, arm: str) -> None:
    """Its arms launch what they are called after, and make the right page table."""
    made = metadata.make(Point("tree", 2, 40, 100), torch.device(device))
    run, table = metadata.ARMS[arm](made)
    table().zero_()
    with launches() as seen:
        run()
    assert names(seen) == {"ours": ["prepare_step_kernel"], "two_launches": ["snapshot_table_kernel", "plan_kernel"]}[arm]
    assert torch.equal(table(), made.req_to_token[made.rows])


@pytest.mark.parametrize("change", ["extra", "prefix_lens", "mask"])
def test_a_wrong_step_is_noticed(device: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of `assert_step`: one position more, prefixes one shorter, or one bit of the mask changed."""
    real = step.prepare_step_launch

    def wrong(*arguments: Any, **options: Any) -> Any:
        values = list(arguments)
        if change == "extra":
            options["extra"] += 1
        elif change == "prefix_lens":
            values[2] = values[2] - 1
        else:
            masks: Masks = values[4]
            flipped = masks.mask.clone()
            flipped[0, 0, 0] = ~flipped[0, 0, 0]
            values[4] = Masks(flipped, masks.full, masks.offsets, masks.q_offsets, masks.queries)
        return real(*values, **options)

    monkeypatch.setattr(step, "prepare_step_launch", wrong)
    with pytest.raises(AssertionError, match="plan" if change == "mask" else "table"):
        assert_step(build("qlen_only", (30, 5), 4, device), device)


def test_garbage_is_neither_followed_nor_exceeds_a_row(device: str) -> None:
    """Lengths and slots that only the host could refuse: the launch stays within the context, the rows and the map."""
    a = build("chain", (3, 4), 2, device, context=20)
    plan = plan_verify_attention(
        a["prefix_lens"], torch.arange(2, dtype=torch.int32, device=device), num_draft_tokens=2, q_heads=2, kv_heads=1,
        head_dim=16, divide=False,
    )  # fmt: skip
    (base, table), (window_base, window_table) = guarded(2, 20, device), guarded(2, 20, device)
    a["req_to_token"][:] = torch.tensor([-1, 1 << 30] * 10, device=device)
    step.prepare_step_launch(
        a["req_to_token"], a["req_pool_indices"], torch.tensor([1 << 40, 1 << 20], device=device), plan, None, table=table,
        page_size=1, slot_map=torch.arange(8, device=device), window_table=window_table, extra=2, q_offsets=None,
    ).run()  # fmt: skip
    assert set(table.flatten().tolist()) == {-1, 1 << 30} and set(window_table.flatten().tolist()) == {0, 7}
    for whole, inside in ((base, table), (window_base, window_table)):
        inside.fill_(GUARD)
        assert bool((whole == GUARD).all())


def test_offsets_beyond_32_bits(device: str) -> None:
    """Row times stride passes 2**31 in the engine's table and in both copies. On a CPU untouched pages take no memory."""
    a = build("chain", (5, 17, 9, 20, 3), 2, device, context=24, slot_map=True)
    assert int(a["req_pool_indices"].max()) >= 4
    stride = 1 << 29
    far = [torch.empty(7 * stride + 24, dtype=torch.int32, device=device).as_strided((8, 24), (stride, 1)) for _ in range(3)]
    near = [torch.full((5, 24), GUARD, dtype=torch.int32, device=device) for _ in range(2)]
    far[0].copy_(a["req_to_token"])
    for one in far[1:]:
        one[:5].fill_(GUARD)
    prepare_step(**a, table=near[0], window_table=near[1])
    prepare_step(**{**a, "req_to_token": far[0]}, table=far[1][:5], window_table=far[2][:5])
    assert torch.equal(near[0], far[1][:5]) and torch.equal(near[1], far[2][:5])


def refusals(device: str) -> list[tuple[str, dict[str, Any]]]:
    """The argument that an error must name, and what to change."""
    wide = torch.zeros(2, 40, dtype=torch.int32, device=device)
    found: list[tuple[str, dict[str, Any]]] = [
        ("table", {"table": wide[:1]}), ("table", {"table": wide.long()}), ("table", {"table": wide[:, ::2]}),
        ("table", {"table": wide[:1].expand(2, 40)}), ("window_table", {"window_table": wide}),
        ("window_table", {"slot_map": torch.arange(99, device=device)}),
        ("window_table", {"slot_map": torch.arange(99, device=device), "window_table": wide[:, :30]}),
        ("slot_map", {"slot_map": torch.arange(0, device=device), "window_table": wide}),
        ("extra", {"extra": -1}), ("page_size", {"page_size": 0}), ("req_pool_indices", {"req_pool_indices": wide[0, :1]}),
        ("req_pool_indices", {"req_pool_indices": wide[0, :4:2]}), ("req_to_token", {"req_to_token": wide[0]}),
        ("extra", {"extra": 1, "q_offsets": wide[0, :3], "num_rows": 4}), ("num_rows", {"q_offsets": wide[0, :3]}),
        ("q_heads", {"q_heads": 3}), ("out", {"out": wide[0, :1]}), ("window", {"window": -2}),
    ]  # fmt: skip
    if device == "cpu":
        found += [
            ("prefix_lens", {"prefix_lens": torch.tensor([-1, 5])}), ("prefix_lens", {"prefix_lens": torch.tensor([9, 39])}),
            ("table", {"table": wide[:, :20]}), ("req_pool_indices", {"req_pool_indices": torch.tensor([0, 9])}),
            ("req_to_token", {"req_to_token": torch.full((5, 40), -1, dtype=torch.int32)}),
            ("req_to_token", {"slot_map": torch.arange(2), "window_table": wide}),
            ("slot_map", {"slot_map": torch.full((99,), -1), "window_table": wide}),
            ("q_offsets", {"q_offsets": torch.tensor([0, 3, 2], dtype=torch.int32), "num_rows": 4}),
            ("q_offsets", {"q_offsets": torch.tensor([0, 3, 9], dtype=torch.int32), "num_rows": 9}),
            ("mask_offsets", {"mask": torch.zeros(500, dtype=torch.bool), "mask_layout": "full_mask",
                              "mask_offsets": torch.tensor([0, 3, 200])}),
        ]  # fmt: skip
    return found


@pytest.mark.parametrize("number", range(28))
def test_refusals_come_before_the_launch(device: str, number: int) -> None:
    cases = refusals(device)
    if number >= len(cases):
        pytest.skip("values are looked at on a CPU only")
    name, change = cases[number]
    good = build("chain", (9, 30), 4, device, context=40)
    table = torch.full((2, 40), GUARD, dtype=torch.int32, device=device)
    with launches() as seen, pytest.raises(ArgumentError) as caught:
        prepare_step(**{**good, "table": table, **change})
    assert caught.value.argument == name and not seen and bool((table == GUARD).all())


@pytest.mark.cuda_graph
@pytest.mark.parametrize("kind", KINDS)
def test_replays_follow_their_buffers(device: str, kind: str) -> None:
    """Captured once, into fixed memory; then other lengths, rows, masks and slots, and fewer of them."""
    a = build(kind, (700, 30, 0, 129), 5, device, slot_map=True, context=720, divide=True)
    blank = plan_verify_attention(
        a["prefix_lens"], torch.arange(4, dtype=torch.int32, device=device),
        **{name: value for name, value in a.items() if name not in TABLE and name != "prefix_lens"},
    )  # fmt: skip
    table, window_table = (torch.full((4, 720), GUARD, dtype=torch.int32, device=device) for _ in range(2))

    def run(**changes: Any) -> None:
        prepare_step(**{**a, "table": table, "window_table": window_table, "out": blank.buffer, **changes})

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        run()
    assert torch.cuda.memory_allocated() == before, "memory was taken in the capture"
    for seed, lens in enumerate([(0, 0, 0, 0), (1, 650, 64, 3), (300, 300, 0, 1)]):
        b = build(kind, lens, 5, device, seed=seed, slot_map=True, context=720, divide=True)
        for name in ("req_to_token", "req_pool_indices", "prefix_lens", "q_offsets", "mask_offsets", "slot_map"):
            if name in a:
                a[name].copy_(b[name])
        if "mask" in a:
            a["mask"].flatten()[: b["mask"].numel()].copy_(b["mask"].flatten()[: a["mask"].numel()])
        results = []
        for way in (graph.replay, run):
            for one in (table, window_table, blank.buffer):
                one.fill_(GUARD)
            way()
            torch.cuda.synchronize()
            results.append([one.clone() for one in (table, window_table, blank.buffer)])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        assert not bool((results[0][0] == GUARD).all())
