"""The path of a GPU without one: Triton's kernels in the interpreter, from metadata that no host reads, eager.

`test_graphs.py` has the same under CUDA graphs. Prefill and plain decode are SGLang's own here, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang.srt.speculative import ngram_worker

from sglang_specverify.backends import calls, device_steps, facts, routes
from sglang_specverify.backends.plans import Dims, Plans, Served, groups
from sglang_specverify.kernels import plan_verify_attention
from sglang_specverify.routing.facts import Mode
from tests.backends import batches
from tests.backends.compare import STOCK, assert_close, expected, inputs, kernels, run
from tests.backends.cover import COMBINATIONS, setup_of
from tests.backends.engine import Engine, Setup
from tests.backends.passes import (
    PROBE,
    add,
    assert_ran,
    check,
    check_draft,
    draft_extender,
    drafter,
    padded,
    target,
    verify_batch,
)
from tests.backends.test_snapshot import hand_over
from tests.interpreter import repair

Make = Callable[[Setup], Engine]

LENGTHS = (5, 0, 40)
TREE = Setup(topk=4, draft_tokens=8)
#: V names every slot, within the largest head dim of the kernels.
SMALL_PROBE = PROBE.but(slots=240, v_head_dim=256)


@pytest.fixture(autouse=True)
def interpreter(triton_alone: None) -> Iterator[None]:
    """Triton's kernels, and the interpreter that computes 16-bit types as a GPU does."""
    repair.apply()
    yield
    repair.remove()


def iteration(one: Engine, **how: Any) -> None:
    """Verify, and for an algorithm with a draft model its steps and its extend; each ran in the fused kernel."""
    backend = target(one)
    check(one, backend, verify_batch(one, backend), **how)
    assert_ran(backend, target_verify="fused")
    if one.setup.algorithm == "NGRAM":
        return
    runner = one.runner(is_draft=True)
    container, extender = drafter(one), draft_extender(one)
    check_draft(one, container, batches.draft(one, runner), **how)
    check(one, extender, batches.draft_extend(one, runner), **how)
    assert_ran(container, draft_decode="fused")
    assert_ran(extender, draft_extend="fused")


#: EAGLE3 and STANDALONE send the batches of EAGLE.
@pytest.mark.parametrize(
    "combination", [c for c in COMBINATIONS if c[0] in ("EAGLE", "NGRAM")], ids=lambda c: "-".join(map(str, c))
)
def test_iteration(engine: Make, combination: tuple[str, str, int, str]) -> None:
    one = engine(setup_of(*combination))
    # Within a page, nothing at all, one token short of the larger page and one past two of the smaller.
    add(one, (5, 0, 63, 33))
    iteration(one)


@pytest.mark.parametrize(
    "setup",
    [
        TREE.but(softcap=3.0),
        TREE.but(page_size=16, windows=(6, -1), softcap=2.0),
        TREE.but(head_dim=32, v_head_dim=8, q_heads=6, kv_heads=2),
        TREE.but(q_heads=8, kv_heads=1, page_size=16, windows=(-1, 4), window_pool=True),
        TREE.but(dtype=torch.bfloat16, cache_dtype=torch.float8_e5m2, scales=(0.25, 4.0), windows=(3,)),
        Setup(windows=(600, -1)),
    ],
    ids=["cap", "cap-window", "dims", "window-pool", "fp8-window", "long-window"],
)
def test_sinks_cap_windows_scales_dims(engine: Make, setup: Setup) -> None:
    one = engine(setup)
    add(one, LENGTHS)
    iteration(one, sinks=True)


@pytest.mark.parametrize(
    "setup",
    [SMALL_PROBE.but(topk=2, draft_tokens=5, page_size=16), SMALL_PROBE.but(topk=2, draft_tokens=5, windows=(4,)), SMALL_PROBE],
    ids=["tree", "window", "chain"],
)
def test_visible_sets(engine: Make, setup: Setup) -> None:
    """Every row weighs exactly the keys that it may see."""
    one = engine(setup)
    add(one, (6, 0, 39), one_hot=True)
    iteration(one, probe=True)


@pytest.mark.parametrize("front", [0, 2])
def test_draft_extend_with_front_tokens(engine: Make, front: int) -> None:
    one = engine(Setup(page_size=16))
    add(one, LENGTHS)
    backend, runner = draft_extender(one), one.runner(is_draft=True)
    check(one, backend, batches.draft_extend(one, runner, front=front))
    assert_ran(backend, draft_extend="fused")


@pytest.mark.parametrize("full_mask", [False, True])
def test_ngram_masks(engine: Make, monkeypatch: pytest.MonkeyPatch, full_mask: bool) -> None:
    monkeypatch.setattr(ngram_worker, "_is_cpu", not full_mask)
    one = engine(TREE.but(algorithm="NGRAM", topk=1))
    add(one, LENGTHS)
    backend = target(one)
    batch = batches.ngram(one, one.runner(), [[-1, 0, 1, 0, 0, 4, 4, 2]] * 3, full_mask=full_mask)
    garbage = torch.rand(100, generator=torch.Generator().manual_seed(1)) < 0.5
    batch.forward.spec_info.custom_mask = torch.cat([batch.forward.spec_info.custom_mask, garbage])
    check(one, backend, batch)
    assert_ran(backend, target_verify="fused")


def test_padded_rows(engine: Make) -> None:
    one = engine(TREE)
    add(one, LENGTHS)
    assert len(padded(one, target(one), 4)) == 3 * 8 + 4


def test_rows_handed_over_after_the_metadata(engine: Make) -> None:
    one = engine(TREE.but(page_size=16))
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    lens = batch.forward.seq_lens
    backend.init_forward_metadata(batch.forward)
    hand_over(one)
    # The scheduler's next step may count on in place.
    lens.add_(9)
    check(one, backend, batch, prepared=True)


def test_no_length_is_read_where_the_host_has_none(engine: Make) -> None:
    """On a GPU SGLang publishes no lengths on the host; the table is then as wide as the context."""
    one = engine(TREE.but(page_size=16))
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    batch.forward.seq_lens_cpu = None
    check(one, backend, batch)
    assert backend.step.full.table.shape[1] * 16 >= one.setup.context
    runner = one.runner(is_draft=True)
    extender = draft_extender(one)
    batch = batches.draft_extend(one, runner)
    batch.forward.seq_lens_cpu = batch.forward.extend_seq_lens_cpu = None
    check(one, extender, batch)


@pytest.mark.parametrize("odd", [0, 1])
def test_one_layer_that_no_route_knows(engine: Make, odd: int) -> None:
    """SGLang's own metadata is made when the first such call comes, out of the same batch."""
    one = engine(TREE.but(windows=(-1, -1), page_size=16))
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    backend.init_forward_metadata(batch.forward)
    for layer in one.layers:
        x = inputs(one, batch.forward)
        more = {"aux_tensors": []} if layer.layer_id == odd else {}
        assert_close(run(backend, layer, batch.forward, x, **more), expected(one, layer, batch, x), STOCK)
    assert kernels(backend.routes.report()) == {"target_verify": {"fused", "stock"}}


def test_prefill_and_decode_are_stock(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    one = engine(TREE)
    add(one, LENGTHS)
    backend = target(one)
    for batch in (batches.extend(one, one.runner(), [3, 1, 2]), batches.decode(one, one.runner())):
        backend.init_forward_metadata(batch.forward)
        x = inputs(one, batch.forward)
        assert_close(run(backend, one.layers[0], batch.forward, x), expected(one, one.layers[0], batch, x), STOCK)
    assert kernels(backend.routes.report()) == {"prefill": {"stock"}, "decode": {"stock"}}


def test_deterministic_rows(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's rows are the same bits alone and in a batch."""
    seen = facts.server_facts
    monkeypatch.setattr(routes, "server_facts", lambda *of: replace(seen(*of), deterministic=True))
    one = engine(Setup(context=4096, slots=4096))
    add(one, (1500, 3, 40))
    backend, outs = target(one), []
    batch = verify_batch(one, backend)
    x = inputs(one, batch.forward)
    for count in (3, 1):
        del one.requests[count:]
        some = verify_batch(one, backend)
        backend.init_forward_metadata(some.forward)
        assert backend.step.plans.deterministic
        outs.append(run(backend, one.layers[0], some.forward, x.of(count * 4)))
    assert (outs[0][:4] == outs[1]).all()


@pytest.mark.parametrize("heads", [8, 64])
def test_deterministic_steps_reserve_scratch_for_what_they_divide(
    engine: Make, monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    """8 drafts of 64 heads are 512 rows of a KV head: deterministic steps divide nothing there."""
    seen = facts.server_facts
    monkeypatch.setattr(routes, "server_facts", lambda *of: replace(seen(*of), deterministic=True))
    one = engine(TREE.but(q_heads=heads, kv_heads=1))
    add(one, LENGTHS)
    backend = target(one)
    backend.init_forward_metadata(verify_batch(one, backend).forward)
    assert (backend._device.scratch.size == 0) == (backend.step.plans.workspace is None) == (heads == 64)


def test_sinks_reach_the_kernel_as_the_layer_has_them(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make another type of them would be a launch for each layer and step."""
    seen: list[Any] = []
    original = calls.verify_attention
    monkeypatch.setattr(calls, "verify_attention", lambda *a, **k: seen.append(k["sinks"]) or original(*a, **k))
    one = engine(TREE.but(dtype=torch.bfloat16))
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    backend.init_forward_metadata(batch.forward)
    x = inputs(one, batch.forward, sinks=True)
    assert x.more["sinks"].dtype == torch.bfloat16
    run(backend, one.layers[0], batch.forward, x)
    assert len(seen) == 1 and seen[0] is x.more["sinks"]


def test_the_switch_for_chains(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_SPLITKV_VERIFY", "0")
    one = engine(Setup())
    add(one, LENGTHS)
    backend = target(one)
    ours = verify_batch(one, backend)
    backend.init_forward_metadata(ours.forward)
    x = inputs(one, ours.forward)
    assert_close(run(backend, one.layers[0], ours.forward, x), expected(one, one.layers[0], ours, x), STOCK)
    assert kernels(backend.routes.report()) == {"target_verify": {"stock"}}


def test_layers_of_two_sizes(engine: Make) -> None:
    """One launch copies the table and plans for the first, another plans for the second."""
    one = engine(TREE)
    add(one, LENGTHS)
    backend = target(one)
    batch = verify_batch(one, backend)
    layers = [Served.of(4, 2, 16, 16, -1, "fused"), Served.of(6, 2, 16, 16, 64, "fused"), Served.of(6, 2, 16, 16, -1, "fused")]
    mask = batch.forward.spec_info.custom_mask[: 3 * 64]
    step = backend._device.eager(batch.forward, Mode.TARGET_VERIFY, tuple(layers), mask)
    plans = step.plans.by_layer
    assert {served: plan.shape.rows for served, plan in plans.items()} == dict(zip(layers, (8 * 2, 8 * 3, 8 * 3), strict=True))
    assert plans[layers[0]].bits.data_ptr() != plans[layers[2]].bits.data_ptr() == plans[layers[1]].bits.data_ptr()
    assert (plans[layers[0]].bits == plans[layers[2]].bits).all()


def test_layers_that_share_a_plan() -> None:
    dims, other = Dims(4, 2, 16, 16), Dims(4, 1, 16, 16)

    def served(of: Dims, window: int, kernel: str = "fused") -> Served:
        return Served.of(of.q_heads, of.kv_heads, of.head_dim, of.v_head_dim, window, kernel)

    full, tile, short, long = served(dims, -1), served(dims, -1, "prefix_tile"), served(dims, 127), served(dims, 4096)
    assert served(dims, 127) == served(dims, 511)
    shared = groups([short, tile, full])
    assert [set(members) for members in shared] == [{full, tile, short}]
    # What is divided is said by the first.
    assert shared[0][0] == full
    assert groups([tile]) == [[tile]]
    assert [(members[0], len(members)) for members in groups([full, long, short])] == [(full, 2), (long, 1)]
    assert len(groups([full, served(other, -1)])) == 2
    # Programs of two kernels are filled by two divisions.
    wide = served(dims, -1, "specialized")
    assert wide.divides
    assert [(members[0], len(members)) for members in groups([short, wide, full])] == [(full, 2), (wide, 1)]


def test_a_step_is_divided_for_the_kernel_that_serves(engine: Make) -> None:
    """No CPU is served by the kernel with specialised warps, but its plans are made by what makes all."""
    one = engine(TREE.but(dtype=torch.bfloat16, kv_heads=1, q_heads=4, head_dim=64, page_size=16))
    add(one, LENGTHS)
    backend = target(one)
    steps, batch = backend._device, verify_batch(one, backend)
    wide, window = Served.of(4, 1, 64, 64, -1, "specialized"), Served.of(4, 1, 64, 64, 6, "fused")
    mask = backend._mask(batch.forward, Mode.TARGET_VERIFY, None)
    step = steps.eager(batch.forward, Mode.TARGET_VERIFY, (wide, window), mask)
    assert step.plans is not None
    plan, other = step.plans.by_layer[wide], step.plans.by_layer[window]
    assert plan.divides and plan.kernel == "specialized" and plan.shape.config.block_m == 128
    assert step.plans.workspace is not None and step.plans.workspace.numel() >= plan.shape.workspace_bytes(len(LENGTHS)) > 0
    assert step.plans.options(wide)["variant"] == "specialized_split"
    # The window layer reads the same masks, and is launched as the fused kernel's table says.
    assert not other.divides and torch.equal(other.bits, plan.bits)
    assert other.shape.config != plan.shape.config and step.plans.options(window)["variant"] == "auto"


def test_every_plan_of_a_step_knows_how_long_a_request_may_be(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of layers which cannot share the first: both are divided by the same rule."""
    one = engine(TREE.but(page_size=16))
    add(one, LENGTHS)
    backend = target(one)
    batch, seen = verify_batch(one, backend), list[int]()

    def plan(*args: Any, **options: Any) -> Any:
        seen.append(options["longest"])
        return plan_verify_attention(*args, **options)

    monkeypatch.setattr(device_steps.kernels, "plan_verify_attention", plan)
    heads = [Served.of(count, 1, 16, 16, -1, "fused") for count in (4, 2)]
    mask = backend._mask(batch.forward, Mode.TARGET_VERIFY, None)
    step = backend._device.eager(batch.forward, Mode.TARGET_VERIFY, tuple(heads), mask)
    assert step.plans is not None
    assert seen == [step.full.table.shape[1] * 16]


def test_a_query_that_the_specialised_kernel_cannot_copy_is_made_whole() -> None:
    plans, wide = Plans(deterministic=False), Served.of(8, 2, 64, 64, -1, "specialized")
    odd = torch.randn(3, 8 * 64 + 8, dtype=torch.bfloat16)[:, 8:].view(3, 8, 64)
    assert plans.query(odd) is odd and plans.query(odd, Served.of(8, 2, 64, 64, -1, "fused")) is odd
    whole = plans.query(odd, wide)
    assert whole.is_contiguous() and torch.equal(whole, odd)
    even = torch.randn(3, 8 * 64 + 16, dtype=torch.bfloat16)[:, 16:].view(3, 8, 64)
    assert plans.query(even, wide) is even


@pytest.mark.parametrize(
    ("kernel", "divide", "variant"),
    [
        ("fused", True, "auto"),
        ("fused", False, "auto"),
        ("specialized", True, "specialized_split"),
        ("specialized", False, "specialized"),
    ],
)
def test_the_kernel_that_was_decided_is_asked_for(kernel: str, divide: bool, variant: str) -> None:
    lens, rows = torch.tensor([700], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    layers = {"num_draft_tokens": 20, "q_heads": 8, "kv_heads": 2, "head_dim": 64, "divide": divide}
    plan = plan_verify_attention(lens, rows, **layers, kernel=kernel if divide else "fused")
    served = Served.of(8, 2, 64, 64, -1, kernel)
    plans = Plans(deterministic=False, by_layer={served: plan}, workspace=torch.empty(0, dtype=torch.uint8))
    options = plans.options(served)
    assert options["variant"] == variant and options["plan"] is plan
    assert (options["workspace"] is not None) == divide
