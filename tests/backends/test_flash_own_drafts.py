"""A tree's drafts through FlashAttention itself, each row with its own: both layouts, and where `gather` does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_specverify.backends import flash as backend_module
from sglang_specverify.backends.flash import SpecverifyFlashAttention4Backend, SpecverifyFlashAttentionBackend
from sglang_specverify.backends.flash_calls import takes_fixed_length
from tests.backends import batches, flash_stand_in
from tests.backends.compare import kernels
from tests.backends.engine import Engine, Setup
from tests.backends.graphs import Graph, buffers_for
from tests.backends.passes import add, assert_ran, check, padded, verify_batch
from tests.backends.test_graphs import hand_over

Make = Callable[[Setup], Engine]

LENGTHS = (5, 0, 18)
TREE = Setup(topk=4, draft_tokens=8)
#: FlashAttention's version, SGLANG_SPECVERIFY_TREE_KERNEL, setup, the layout of the drafts' call.
CASES = {
    "fa3": (3, "flash", TREE, "varlen"),
    "fa3, pages, group 3, cap": (3, "flash", TREE.but(page_size=16, q_heads=6, softcap=2.0), "varlen"),
    "fa3, window pool": (3, "flash", TREE.but(windows=(-1, 6), page_size=16, window_pool=True), "varlen"),
    "fa3, head dim over gather's": (3, "gather", TREE.but(head_dim=136, q_heads=2), "varlen"),
    "fa4": (4, "flash", TREE.but(q_heads=6), "fixed"),
    "fa4, cap": (4, "flash", TREE.but(softcap=2.0), "varlen"),
}


@pytest.fixture(autouse=True)
def flash(triton_alone: None, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", "flash")
    flash_stand_in.install(monkeypatch)
    return flash_stand_in.calls


def target(one: Engine, version: int) -> Any:
    cls = {3: SpecverifyFlashAttentionBackend, 4: SpecverifyFlashAttention4Backend}[version]
    return cls(one.runner(), part="target", fa_impl_ver=version)


@pytest.mark.parametrize("name", CASES)
def test_trees(engine: Make, monkeypatch: pytest.MonkeyPatch, flash: list[Any], name: str) -> None:
    version, asked, setup, layout = CASES[name]
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", asked)
    one = engine(setup)
    add(one, LENGTHS)
    backend = target(one, version)
    check(one, backend, verify_batch(one, backend), sinks=True)
    prefix, drafts = flash
    assert {call["ver"] for call in flash} == {version}
    assert not any(call["sinks"] or call["causal"] for call in flash), "sinks count once, and a draft's row is not the last key's"
    assert (prefix["layout"], prefix["sequences"], prefix["page"]) == ("varlen", 3, setup.page_size)
    assert (drafts["layout"], drafts["sequences"], drafts["page"], drafts["splits"]) == (layout, 24, 1, 1)
    assert drafts["table"] == setup.steps + 1, "as wide as a tree is deep"
    window = {"fused"} if len(one.layers) > 1 else set()
    assert kernels(backend.routes.report()) == {"target_verify": {"prefix_flash"} | window}


@pytest.mark.parametrize(("drafts", "kernel"), [(64, "prefix_gather"), (65, "prefix_flash")])
def test_the_deepest_row_of_gather(
    engine: Make, monkeypatch: pytest.MonkeyPatch, flash: list[Any], drafts: int, kernel: str
) -> None:
    """A draft that is one path, so that its last row sees every draft."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE_KERNEL", "gather")
    one = engine(Setup(algorithm="NGRAM", topk=4, draft_tokens=drafts, q_heads=2, kv_heads=1))
    add(one, (3,))
    backend = target(one, 3)
    batch = batches.ngram(one, one.runner(), [list(range(-1, drafts - 1))])
    assert max(len(keys) for keys in batch.keys) == 3 + drafts
    check(one, backend, batch)
    assert_ran(backend, target_verify=kernel)
    assert [call["table"] for call in flash[1:]] == ([65] if kernel == "prefix_flash" else [])


@pytest.mark.parametrize(("version", "page_size"), [(3, 16), (4, 1)])
def test_captured(engine: Make, version: int, page_size: int) -> None:
    """Replays of other lengths and of fewer requests, over rows that belong to others once the metadata is made."""
    one = engine(TREE.but(page_size=page_size))
    add(one, LENGTHS)
    backend = target(one, version)
    graph = Graph(one, backend, buffers_for(one, backend, ForwardMode.TARGET_VERIFY, 4), ForwardMode.TARGET_VERIFY, 4)
    graph.replay(verify_batch(one, backend), sinks=True)
    one.requests.pop()
    batch = verify_batch(one, backend)
    graph.load(batch)
    backend.init_forward_metadata_in_graph(graph.batch)
    hand_over(one)
    graph.run(batch, sinks=True)
    assert_ran(backend, target_verify="prefix_flash")


def test_padded_rows(engine: Make) -> None:
    one = engine(TREE)
    add(one, LENGTHS)
    assert len(padded(one, target(one, 4), 4)) == 3 * 8 + 4


def _heads_swapped(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out, lse.flip(1)


def _rows_shifted(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out.roll(1, 0), lse.roll(1, 0)


def _lse_of_a_key_less(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out, lse - 0.1


@pytest.mark.parametrize("fault", [_heads_swapped, _rows_shifted, _lse_of_a_key_less])
def test_a_wrong_result_of_the_drafts_is_seen(engine: Make, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]) -> None:
    one = engine(TREE)
    add(one, LENGTHS)
    backend, right = target(one, 3), backend_module.attend_own_drafts
    check(one, backend, verify_batch(one, backend))
    monkeypatch.setattr(backend_module, "attend_own_drafts", lambda *a, **k: fault(*right(*a, **k)))
    with pytest.raises(AssertionError, match="elements off"):
        check(one, backend, verify_batch(one, backend))


@pytest.mark.parametrize("where", ["slots", "lens"])
def test_a_wrong_list_of_the_drafts_is_seen(engine: Make, where: str) -> None:
    one = engine(TREE)
    add(one, LENGTHS)
    backend = target(one, 3)
    batch = verify_batch(one, backend)
    backend.init_forward_metadata(batch.forward)
    slots, lens = backend.step.plans.suffix
    if where == "slots":
        slots.copy_(slots.roll(1, 0))
    else:
        lens.sub_(1)
    with pytest.raises(AssertionError, match="elements off"):
        check(one, backend, batch, prepared=True)


def test_when_the_layout_without_offsets_is_taken() -> None:
    scale = torch.ones(2, 1)
    assert takes_fixed_length(4, 0.0, None)
    assert not takes_fixed_length(3, 0.0, None), "FA3 keeps the layout that SGLang's own calls have"
    assert not takes_fixed_length(4, 30.0, None)
    assert not takes_fixed_length(4, 0.0, (scale, scale))


def _call(**changes: Any) -> Any:
    """Two sequences of one row over a cache of 8 pages, as FA4 takes them without offsets."""
    given: dict[str, Any] = {
        "q": torch.randn(2, 1, 2, 16), "k_cache": torch.randn(8, 1, 1, 16), "v_cache": torch.randn(8, 1, 1, 16),
        "page_table": torch.tensor([[1, 2], [3, 9]], dtype=torch.int32), "cache_seqlens": torch.tensor([2, 1], dtype=torch.int32),
        "max_seqlen_q": 1, "softmax_scale": 0.25, "causal": False, "return_softmax_lse": True, "ver": 4, **changes,
    }  # fmt: skip
    return flash_stand_in.flash_attn_with_kvcache(given.pop("q"), given.pop("k_cache"), given.pop("v_cache"), **given)


_FP8 = {"q": torch.zeros(2, 1, 2, 16).to(torch.float8_e4m3fn), "k_cache": torch.zeros(8, 1, 1, 16).to(torch.float8_e4m3fn),
        "v_cache": torch.zeros(8, 1, 1, 16).to(torch.float8_e4m3fn)}  # fmt: skip
_OFFSETS = torch.tensor([0, 1, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"softcap": 2.0}, "no modifier and no scale tensor"),
        ({"k_descale": torch.ones(2, 1)}, "no modifier and no scale tensor"),
        ({"k_descale": torch.ones(2, 1), "ver": 3}, "only supported for FP8"),
        ({**_FP8, "k_descale": torch.ones(1, 1), "ver": 3}, "descale"),
        (_FP8, "FA4's needs SM100"),
        ({"q": torch.randn(2, 2, 16)}, "without offsets"),
        ({"cu_seqlens_q": _OFFSETS}, "with offsets"),
        ({"q": torch.randn(2, 2, 16), "cu_seqlens_q": _OFFSETS.long()}, "32-bit"),
        ({"cache_seqlens": torch.tensor([2, 1])}, "32-bit"),
        ({"cache_seqlens": torch.tensor([2, 2], dtype=torch.int32)}, "a page that is not there"),
        ({"page_table": torch.tensor([[1, 2]], dtype=torch.int32)}, "one row of the table"),
        ({"page_table": torch.tensor([[1, 3], [2, 4]], dtype=torch.int32).T}, "contiguous"),
        ({"k_cache": torch.randn(8, 1, 1, 16).double()}, "one type"),
        ({"v_cache": torch.randn(8, 1, 16)}, "caches are"),
    ],
)
def test_what_flash_attention_refuses(changes: dict[str, Any], what: str) -> None:
    """The stand-in refuses it too, or the tests above would not see a call that no GPU takes."""
    out, lse = _call()
    assert out.shape == (2, 1, 2, 16) and lse.shape == (2, 2, 1)
    with pytest.raises(AssertionError, match=what):
        _call(**changes)


def test_both_layouts_say_the_same() -> None:
    q = torch.randn(2, 2, 16)
    cache = {"k_cache": torch.randn(8, 1, 1, 16), "v_cache": torch.randn(8, 1, 1, 16)}
    fixed, by_head = _call(q=q.unsqueeze(1), **cache)
    flat, lse = _call(q=q, cu_seqlens_q=_OFFSETS, **cache)
    assert torch.equal(fixed.squeeze(1), flat) and torch.equal(by_head.squeeze(2), lse.T)
