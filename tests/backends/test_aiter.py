"""The backends over SGLang's aiter backend, with a stand-in for aiter: who serves, and what every row sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_specverify.errors import SpecverifyError
from tests.backends import aiter_stand_in, batches
from tests.backends.aiter_passes import (
    check,
    check_draft,
    draft,
    draft_extend,
    drafter,
    eighths,
    expanded,
    extender,
    name_slots,
    on,
    page_setup,
    target,
)
from tests.backends.aiter_stand_in import lens_of
from tests.backends.compare import kernels
from tests.backends.engine import Engine, Setup
from tests.backends.passes import add, assert_ran, padded, verify_batch

Make = Callable[[Setup], Engine]

FP8 = Setup(cache_dtype=torch.float8_e4m3fn, scales=(0.5, 2.0))
#: SGLang's window for aiter's unified attention is one key shorter than for its other backends, in prefill and decode too.
SHORTER = 1


@pytest.fixture(autouse=True)
def aiter(triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    for name in ("SGLANG_USE_AITER_UNIFIED_ATTN", "SGLANG_AITER_UNIFIED_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    aiter_stand_in.install(monkeypatch)


@pytest.fixture
def unified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_AITER_UNIFIED_ATTN", "1")


@pytest.mark.usefixtures("unified")
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_every_step_sees_its_keys(engine: Make, page: int, topk: int) -> None:
    """V says its slot: the prefix once, and the row's own drafts, in each step of a draft, in verify and in draft extend.

    A server takes triton for trees on pages; the classes serve them over aiter too.
    """
    one = engine(page_setup(page, topk))
    lengths = (5, 0, 39) if page < 64 else (5, 0, 66)
    add(one, lengths)
    name_slots(one)
    container, backend = drafter(one), target(one)
    check_draft(one, container, draft(one), probe=True)
    check(one, backend, verify_batch(one, backend), probe=True)
    assert_ran(container, draft_decode="stock" if topk == 1 else "fused")
    assert_ran(backend, target_verify="stock" if topk == 1 else "fused")
    steps = [[n + step + 1 for n in lengths] for step in range(one.setup.steps - 1)] + [[n + 4 for n in lengths]]
    assert lens_of("unified_attention") == (steps if topk == 1 else [])
    last = extender(one)
    check(one, last, draft_extend(one), probe=True)
    assert_ran(last, draft_extend="stock")


@pytest.mark.usefixtures("unified")
@pytest.mark.parametrize("pool", [False, True], ids=["one pool", "window pool"])
def test_windows(engine: Make, monkeypatch: pytest.MonkeyPatch, pool: bool) -> None:
    """The layer's window at each row's own place, over its own pool; a cap, sinks and a head dim of V's own beside it."""
    window = 6
    setup = page_setup(16).but(windows=(-1, window), window_pool=pool, softcap=2.0, slots=2048)
    one = engine(setup)
    add(one, (5, 0, 39))
    seen = "tests.backends.compare.seen"
    from tests.backends.compare import seen as exact

    monkeypatch.setattr(seen, lambda keys, at, size: exact(keys, at, size - SHORTER if size >= 0 else size))
    container, backend, last = drafter(one), target(one), extender(one)
    check_draft(one, container, draft(one), sinks=True)
    check(one, backend, verify_batch(one, backend), sinks=True)
    check(one, last, draft_extend(one), sinks=True)
    for each in (container, backend, last):
        assert {row["kernel"] for row in each.routes.report() if row["calls"]} == {"stock"}


@pytest.mark.parametrize("page", [1, 16])
def test_without_unified_attention(engine: Make, page: int) -> None:
    """Chains are verified by the plugin's kernel; draft steps and draft extend stay with aiter's paged attention and prefill."""
    one = engine(Setup(page_size=page))
    add(one, (5, 0, 39))
    container, backend, last = drafter(one), target(one), extender(one)
    check_draft(one, container, draft(one))
    assert lens_of("paged_attention_ragged") == [[6, 1, 40], [7, 2, 41]]
    check(one, backend, verify_batch(one, backend))
    check(one, last, draft_extend(one))
    assert [name for name, _ in aiter_stand_in.calls[2:]] == ["mha_batch_prefill_func"]
    assert_ran(container, draft_decode="stock")
    assert_ran(backend, target_verify="fused")
    assert_ran(last, draft_extend="stock")


@pytest.mark.parametrize("sinks", [None, "sinks", "attention_sink_bias"])
@pytest.mark.parametrize("windows", [(-1,), (-1, 6)], ids=["full", "window"])
def test_draft_steps_that_paged_attention_cannot_take(engine: Make, windows: tuple[int, ...], sinks: str | None) -> None:
    """It has no window and no sinks: those layers run on the plugin's kernel, the others on it."""
    one = engine(Setup(windows=windows, sinks=sinks))
    add(one, (5, 39))
    container = drafter(one)
    check_draft(one, container, draft(one))
    ran = ({"stock"} if sinks is None else {"fused"}) | ({"fused"} if len(windows) > 1 else set())
    assert kernels(container.routes.report()) == {"draft_decode": ran}
    assert len(lens_of("paged_attention_ragged")) == (2 if sinks is None else 0)


@pytest.mark.parametrize("on_unified", [False, True])
def test_an_fp8_cache(engine: Make, monkeypatch: pytest.MonkeyPatch, on_unified: bool) -> None:
    monkeypatch.setenv("SGLANG_USE_AITER_UNIFIED_ATTN", str(int(on_unified)))
    one = engine(FP8.but(page_size=16))
    add(one, (5, 0, 39))
    eighths(one)
    container, backend = drafter(one), target(one)
    check_draft(one, container, draft(one), relative=2.0**-9)
    check(one, backend, verify_batch(one, backend))
    quantised = [arguments["q"] for name, arguments in aiter_stand_in.calls if arguments["lens"] in ([6, 1, 40], [7, 2, 41])]
    assert quantised == [torch.float8_e4m3fn if on_unified else torch.float32] * 2


@pytest.mark.parametrize("on_unified", [False, True])
def test_a_tree_over_an_fp8_cache_sees_the_q_of_decode(engine: Make, monkeypatch: pytest.MonkeyPatch, on_unified: bool) -> None:
    """Unified attention decodes with Q in FP8, saturated: a tree's Q is rounded alike. Paged attention takes Q as it is."""
    monkeypatch.setenv("SGLANG_USE_AITER_UNIFIED_ATTN", str(int(on_unified)))
    one = engine(FP8.but(topk=4, draft_tokens=8))
    add(one, (5, 0, 39))
    eighths(one)
    backend = target(one)
    batch = verify_batch(one, backend)
    backend.init_forward_metadata(batch.forward)
    from tests.backends.compare import STOCK, assert_close, expected, inputs, run

    x = inputs(one, batch.forward)
    x.q = x.q * 1.0625
    x.q[0, 0] = 500.0
    out = run(backend, one.layers[0], batch.forward, x)
    x.q = x.q.clamp(-448, 448).to(torch.float8_e4m3fn).float() if on_unified else x.q
    assert_close(out, expected(one, one.layers[0], batch, x), STOCK)


def test_scales_of_a_cache_that_is_not_fp8(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's aiter backend neither divides by them nor applies them; a tree on the plugin's kernel must not either."""
    one = engine(Setup(topk=4, draft_tokens=8, scales=(0.5, 2.0)))
    add(one, (5, 39))

    def stored(engine: Engine, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = engine.pool.get_kv_buffer(layer.layer_id)
        return k.double(), v.double()

    for module in ("compare", "aiter_passes"):
        monkeypatch.setattr(f"tests.backends.{module}.cache_of", stored)
    backend = target(one)
    check(one, backend, verify_batch(one, backend))


@pytest.mark.usefixtures("unified")
@pytest.mark.parametrize("setup", [Setup(), FP8, Setup(windows=(-1, 6), window_pool=True, slots=2048)], ids=["", "fp8", "pool"])
def test_replicated_kv_heads(engine: Make, monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    """K and V of one head, expanded with stride 0: through every write to the cache, and by the kernel for trees."""
    from tests.backends.compare import seen as exact

    monkeypatch.setattr("tests.backends.compare.seen", lambda keys, at, w: exact(keys, at, w - SHORTER if w >= 0 else w))
    one = engine(setup)
    add(one, (5, 0, 39))
    eighths(one)
    container, backend = drafter(one), target(one)
    check_draft(one, container, draft(one), change=expanded, relative=2.0**-9)
    check(one, backend, verify_batch(one, backend), change=expanded)
    if not one.is_window_pool:
        tree = engine(setup.but(topk=4, draft_tokens=8))
        add(tree, (5, 39))
        eighths(tree)
        backend = target(tree)
        check(tree, backend, verify_batch(tree, backend), change=expanded)


@pytest.mark.parametrize("topk", [1, 4])
def test_ngram(engine: Make, topk: int) -> None:
    """Its drafts are trees at breadth 1 too, which aiter's unified attention would verify as chains."""
    one = engine(Setup(algorithm="NGRAM", topk=topk, draft_tokens=6))
    add(one, (5, 0, 39))
    backend = target(one)
    parents = [[-1, 0, 0, 1, 2, 0], [-1, 0, 1, 2, 0, 4], [-1, 0, 0, 0, 3, 3]]
    check(one, backend, batches.ngram(one, one.runner(), parents))
    assert_ran(backend, target_verify="fused")


def test_padded_rows_of_a_tree(engine: Make) -> None:
    one = engine(Setup(topk=4, draft_tokens=8))
    add(one, (5, 39))
    assert len(padded(one, target(one), 4)) == 2 * 8 + 4


@pytest.mark.usefixtures("unified")
def test_the_length_reaches_the_assembly_kernel_of_gfx950_too(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention import aiter_backend

    seen: list[list[int]] = []

    def refuse(**arguments: Any) -> bool:
        seen.append(arguments["seqused_k"].tolist())
        return False

    monkeypatch.setattr(aiter_backend, "is_gfx95_supported", lambda: True)
    monkeypatch.setattr(aiter_backend, "unified_attention_3d_mtp_decode_func", refuse, raising=False)
    one = engine(Setup(page_size=16, head_dim=256, q_heads=2, kv_heads=1))
    add(one, (5, 39))
    check_draft(one, drafter(one), draft(one))
    assert seen == lens_of("unified_attention") == [[6, 40], [7, 41]]


@pytest.mark.parametrize(
    ("flag", "mode"), [("SGLANG_SPECVERIFY_TREE", "target_verify"), ("SGLANG_SPECVERIFY_DRAFT_DECODE", "draft_decode")]
)
def test_a_tree_is_never_left_to_sglang(engine: Make, monkeypatch: pytest.MonkeyPatch, flag: str, mode: str) -> None:
    monkeypatch.setenv(flag, "0")
    one = engine(Setup(topk=4, draft_tokens=8))
    with pytest.raises(SpecverifyError, match=rf"{mode} of a tree, and SGLang's aiter backend knows chains alone: {flag}=0"):
        (target if mode == "target_verify" else drafter)(one)
    chain = engine(Setup())
    (target if mode == "target_verify" else drafter)(chain)


def test_another_layout_of_the_cache_is_refused(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_SPECVERIFY_STRICT")
    one = engine(Setup(topk=4, draft_tokens=8))
    one.pool.kv_cache_layout = "vectorized_5d"
    with pytest.raises(SpecverifyError, match="cache layout vectorized_5d"):
        target(one)


@pytest.mark.parametrize("algorithm", ["EAGLE", None])
@pytest.mark.parametrize("make", [target, extender])
def test_a_chain_over_another_layout_is_refused(engine: Make, monkeypatch: pytest.MonkeyPatch, make: Any, algorithm: Any) -> None:
    """SGLang's verify would view it as a plain cache. Without speculation it serves, as SGLang has it."""
    monkeypatch.delenv("SGLANG_SPECVERIFY_STRICT")
    one = engine(Setup(algorithm=algorithm))
    one.pool.kv_cache_layout = "vectorized_5d"
    if algorithm is None:
        assert make(one).kv_cache_is_vectorized_5d
        return
    with pytest.raises(SpecverifyError, match="cache layout vectorized_5d, which SGLang's aiter backend does not know"):
        make(one)


@pytest.mark.usefixtures("unified")
def test_opt_outs_leave_sglang_as_it_is(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(Setup(page_size=16))
    add(one, (5, 39))
    monkeypatch.setenv("SGLANG_SPECVERIFY_DRAFT_DECODE", "0")
    monkeypatch.setenv("SGLANG_SPECVERIFY_AITER_VERIFY", "0")
    tables: list[str] = []
    for name in ("page_table_of_rows", "page_table_of_ragged"):
        monkeypatch.setattr(f"sglang_specverify.backends.aiter_corrected.{name}", lambda *_, **__: tables.append("ours"))
    container, backend = drafter(one), target(one)
    with pytest.raises(AssertionError, match="elements off"):
        check_draft(one, container, draft(one))
    assert lens_of("unified_attention")[0] == [5, 39], "SGLang's own length of a draft step"
    check(one, backend, verify_batch(one, backend))
    reasons = {row["reason"] for each in (container, backend) for row in each.routes.report() if row["calls"]}
    assert not tables and all(any(flag in reason for reason in reasons) for flag in ("DRAFT_DECODE=0", "AITER_VERIFY=0"))


def test_gfx942_waits_to_be_admitted(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "gfx942")
    one = engine(Setup(dtype=torch.bfloat16))
    add(one, (5, 39))
    left = target(one)
    monkeypatch.setenv("SGLANG_SPECVERIFY_GFX942", "1")
    admitted = target(one)
    for backend, kernel in ((left, "stock"), (admitted, "fused")):
        rows = [row for row in backend.routes.report() if row["mode"] == "target_verify"]
        assert [row["kernel"] for row in rows] == [kernel]
