"""Every refusal of verify and draft-decode attention: which argument it names, and that nothing was written before it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.kernels import (
    draft_decode_attention,
    draft_decode_attention_reference,
    verify_attention,
    verify_attention_reference,
)
from sglang_specverify.kernels.arguments import VerifyArguments, check_verify

from .cases import Config, build_draft, build_verify

INT32, INT64 = torch.int32, torch.int64


def base(kind: str = "chain") -> dict[str, Any]:
    """bs 2, W 4, Hq 4, Hkv 2, D 8, Dv 6, T 9: every dimension is told apart by its size."""
    c = Config(kind=kind, q_heads=4, kv_heads=2, v_head_dim=6, pad_rows=1, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    return build_verify(c)


def refused(operation: Any, a: dict[str, Any], argument: str, text: str) -> None:
    guard = torch.full((len(a["q"]), 4, 6), 77.0, dtype=torch.bfloat16) if isinstance(a.get("q"), torch.Tensor) else None
    if guard is not None and guard.shape[0] and "out" not in a:
        a = {**a, "out": guard}
    with pytest.raises(ArgumentError) as raised:
        operation(**a)
    assert raised.value.argument == argument
    assert text in str(raised.value), str(raised.value)
    assert guard is None or (guard == 77.0).all()


def wide(t: torch.Tensor) -> torch.Tensor:
    """The same values with last stride 2."""
    return t.repeat_interleave(2, dim=-1)[..., ::2]


#: Argument, its bad value made from a good call, part of the message.
COMMON = {
    "q: no tensor": ("q", lambda a: [1.0], "list"),
    "q: int": ("q", lambda a: a["q"].int(), "int32"),
    "q: FP8": ("q", lambda a: a["q"].to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "q: two dimensions": ("q", lambda a: a["q"].flatten(1), "[9, 32]"),
    "q: last stride": ("q", lambda a: wide(a["q"]), "last stride 1"),
    "q: heads no multiple": ("q", lambda a: a["q"][:, :3], "3 query heads for 2 KV heads"),
    "k_cache: type": ("k_cache", lambda a: a["k_cache"].view(torch.int16), "int16"),
    "k_cache: bytes of FP8": ("k_cache", lambda a: torch.zeros(a["k_cache"].shape, dtype=torch.uint8), "uint8"),
    "k_cache: head dim": ("k_cache", lambda a: a["k_cache"][..., :7], "[slots, Hkv, 8]"),
    "k_cache: last stride": ("k_cache", lambda a: wide(a["k_cache"]), "last stride 1"),
    "k_cache: device": ("k_cache", lambda a: a["k_cache"].to("meta"), "on meta"),
    "v_cache: slots": ("v_cache", lambda a: a["v_cache"][:-1], "Dv]"),
    "v_cache: heads": ("v_cache", lambda a: a["v_cache"][:, :1], "2, Dv]"),
    "v_cache: last stride": ("v_cache", lambda a: wide(a["v_cache"]), "last stride 1"),
    "table: int64": ("table", lambda a: a["table"].long(), "int64"),
    "table: one row": ("table", lambda a: a["table"][0], "[rows, width]"),
    "table: last stride": ("table", lambda a: wide(a["table"]), "last stride 1"),
    "table: too narrow": ("table", lambda a: a["table"][:, :8], "8 columns"),
    "row_ids: int64": ("row_ids", lambda a: a["row_ids"].long(), "int64"),
    "row_ids: length": ("row_ids", lambda a: a["row_ids"][:1], "shape [1]"),
    "row_ids: beyond": ("row_ids", lambda a: a["row_ids"] + 50, "for request 0"),
    "row_ids: negative": ("row_ids", lambda a: torch.tensor([0, -1], dtype=INT32), "-1 for request 1"),
    "prefix_lens: float": ("prefix_lens", lambda a: a["prefix_lens"].float(), "float32"),
    "prefix_lens: negative": ("prefix_lens", lambda a: torch.tensor([3, -2]), "-2 for request 1"),
    "page_size: 0": ("page_size", lambda a: 0, "at least 1"),
    "page_size: float": ("page_size", lambda a: 16.0, "16.0"),
    "page_size: bool": ("page_size", lambda a: True, "True"),
    "slot_map: float": ("slot_map", lambda a: torch.zeros(4), "float32"),
    "slot_map: too short": ("table", lambda a: "slot_map", "an entry of slot_map"),
    "window: -2": ("window", lambda a: -2, "at least -1"),
    "softcap: negative": ("softcap", lambda a: -1.0, "at least 0"),
    "softcap: NaN": ("softcap", lambda a: float("nan"), "finite"),
    "sinks: FP64": ("sinks", lambda a: torch.zeros(4, dtype=torch.float64), "float64"),
    "sinks: KV heads": ("sinks", lambda a: torch.zeros(2), "[4]"),
    "k_scale: shape": ("k_scale", lambda a: torch.ones(4), "[2]"),
    "k_scale: infinite": ("k_scale", lambda a: float("inf"), "finite"),
    "k_scale: text": ("k_scale", lambda a: "1", "'1'"),
    "v_scale: int tensor": ("v_scale", lambda a: torch.ones(2, dtype=INT32), "int32"),
    "v_scale: device": ("v_scale", lambda a: torch.ones(2, device="meta"), "on meta"),
    "sm_scale: infinite": ("sm_scale", lambda a: float("inf"), "finite"),
    "deterministic": ("deterministic", lambda a: 1, "True or False"),
    "return_lse": ("return_lse", lambda a: None, "True or False"),
    "out: rows": ("out", lambda a: torch.zeros(8, 4, 6, dtype=torch.bfloat16), "[9, 4, 6]"),
    "out: K's head dim": ("out", lambda a: torch.zeros(9, 4, 8, dtype=torch.bfloat16), "[9, 4, 6]"),
    "out: type": ("out", lambda a: torch.zeros(9, 4, 6, dtype=INT32), "int32"),
    "out: last stride": ("out", lambda a: wide(torch.zeros(9, 4, 6)), "last stride 1"),
    "out: overlaps itself": ("out", lambda a: torch.zeros(1, 4, 6).expand(9, 4, 6), "no stride 0"),
    "lse: bf16": ("lse", lambda a: torch.zeros(9, 4, dtype=torch.bfloat16), "bfloat16"),
    "lse: transposed": ("lse", lambda a: torch.zeros(4, 9), "[9, 4]"),
    "lse: overlaps itself": ("lse", lambda a: torch.zeros(9, 1).expand(9, 4), "no stride 0"),
    "variant": ("variant", lambda a: "fast", "auto, reference"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("which", ["verify", "draft"])
@pytest.mark.parametrize("public", [True, False])
def test_common_refusals(name: str, which: str, public: bool) -> None:
    argument, bad, text = COMMON[name]
    if which == "verify":
        a, operation = base(), verify_attention if public else verify_attention_reference
    else:
        c = Config(q_heads=4, kv_heads=2, v_head_dim=6, pad_rows=1, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
        a, operation = (
            build_draft(c, topk=4, step=0, steps=2),
            draft_decode_attention if public else draft_decode_attention_reference,
        )
    if name == "slot_map: too short":
        a["slot_map"] = torch.zeros(1, dtype=INT64)
        with pytest.raises(ArgumentError, match=text):
            operation(**a)
        return
    a[argument] = bad(a)
    refused(operation, a, argument, text)


VERIFY = {
    "no W": ("chain", {"num_draft_tokens": None}, "num_draft_tokens", "q_offsets"),
    "W 0": ("chain", {"num_draft_tokens": 0}, "num_draft_tokens", "at least 1"),
    "W float": ("chain", {"num_draft_tokens": 4.0}, "num_draft_tokens", "4.0"),
    "too few rows": ("chain", {"num_draft_tokens": 5}, "num_draft_tokens", "10 query rows"),
    "q_offsets int64": ("chain", {"q_offsets": torch.tensor([0, 4, 8])}, "q_offsets", "int64"),
    "q_offsets length": ("chain", {"q_offsets": torch.tensor([0, 4], dtype=INT32)}, "q_offsets", "[3]"),
    "q_offsets fall": ("chain", {"q_offsets": torch.tensor([0, 4, 3], dtype=INT32)}, "q_offsets", "never fall"),
    "q_offsets negative": ("chain", {"q_offsets": torch.tensor([-1, 2, 3], dtype=INT32)}, "q_offsets", "from 0 on"),
    "q_offsets beyond": (
        "chain", {"q_offsets": torch.tensor([0, 2, 10], dtype=INT32), "num_draft_tokens": 8}, "q_offsets", "10 query"
    ),
    "more than the bound": ("chain", {"q_offsets": torch.tensor([0, 3, 8], dtype=INT32)}, "q_offsets", "of 5 rows"),
    "layout": ("qlen_only", {"mask_layout": "QLEN_ONLY"}, "mask_layout", "qlen_only or full_mask"),
    "layout without a mask": ("chain", {"mask_layout": "causal"}, "mask_layout", "qlen_only or full_mask"),
    "qlen_only, ragged": ("qlen_only", {"q_offsets": torch.tensor([0, 4, 8], dtype=INT32)}, "mask_layout", "no common W"),
    "mask float": ("qlen_only", {"mask": torch.ones(2, 4, 4)}, "mask", "float32"),
    "mask [bs, W]": ("qlen_only", {"mask": torch.ones(2, 4, dtype=torch.bool)}, "mask", "[2, 4, 4]"),
    "mask bs": ("qlen_only", {"mask": torch.ones(3, 4, 4, dtype=torch.bool)}, "mask", "[2, 4, 4]"),
    "mask W": ("qlen_only", {"mask": torch.ones(2, 4, 5, dtype=torch.bool)}, "mask", "[2, 4, 4]"),
    "mask strides": ("qlen_only", {"mask": torch.ones(2, 4, 4, dtype=torch.bool).mT}, "mask", "contiguous"),
    "flat mask short": ("qlen_only", {"mask": torch.ones(31, dtype=torch.bool)}, "mask", "32 or more"),
    "offsets with qlen_only": ("qlen_only", {"mask_offsets": torch.tensor([0, 16, 32])}, "mask_offsets", "only full_mask"),
    "offsets without a mask": ("chain", {"mask_offsets": torch.tensor([0, 16, 32])}, "mask_offsets", "only full_mask"),
    "no offsets": ("full_mask", {"mask_offsets": None}, "mask_offsets", "NoneType"),
    "offsets int32": ("full_mask", {"mask_offsets": torch.tensor([0, 36, 88], dtype=INT32)}, "mask_offsets", "int32"),
    "offsets length": ("full_mask", {"mask_offsets": torch.tensor([0, 36])}, "mask_offsets", "[3]"),
    "offsets too close": ("full_mask", {"mask_offsets": torch.tensor([0, 35, 88])}, "mask_offsets", "0 to 35 for request 0"),
    "offsets negative": ("full_mask", {"mask_offsets": torch.tensor([-9, 36, 88])}, "mask_offsets", "-9 to 36"),
    "offsets beyond": ("full_mask", {"mask_offsets": torch.tensor([0, 36, 880])}, "mask", "880 or more"),
    "full mask [bs, W, W]": ("full_mask", {"mask": torch.ones(2, 4, 4, dtype=torch.bool)}, "mask", "[entries]"),
    "qlen-sized full mask": ("full_mask", {"mask": torch.ones(32, dtype=torch.bool)}, "mask", "32 entries"),
    "window, tree, no positions": ("qlen_only", {"window": 3, "positions": None}, "positions", "plus its depth"),
    "window, full_mask, no positions": ("full_mask", {"window": 0, "positions": None}, "positions", "plus its depth"),
    "positions float": ("qlen_only", {"positions": torch.zeros(8)}, "positions", "float32"),
    "positions short": ("qlen_only", {"positions": torch.zeros(7, dtype=INT64)}, "positions", "8 or more"),
    "positions short, ragged": (
        "full_mask", {"q_offsets": torch.tensor([0, 4, 8], dtype=INT32), "positions": torch.zeros(7, dtype=INT64)},
        "positions", "8 or more",
    ),
    "table near the limit": ("chain", {"prefix_lens": torch.tensor([5, 12])}, "table", "request 1 ends at position 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERIFY)
@pytest.mark.parametrize("operation", [verify_attention, verify_attention_reference])
def test_verify_refusals(name: str, operation: Any) -> None:
    kind, changes, argument, text = VERIFY[name]
    refused(operation, {**base(kind), **changes}, argument, text)


IDLE = {
    "W -3": ({"num_draft_tokens": -3}, "num_draft_tokens", "at least 1"),
    "W text": ({"num_draft_tokens": "x"}, "num_draft_tokens", "'x'"),
    "mask text": ({"mask": "x"}, "mask", "str"),
    "mask of a request": ({"mask": torch.ones(1, 4, 4, dtype=torch.bool)}, "mask", "[0, 4, 4]"),
    "q_offsets int64": ({"q_offsets": torch.tensor([0])}, "q_offsets", "int64"),
    "positions float": ({"positions": torch.zeros(8)}, "positions", "float32"),
}


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.parametrize("operation", [verify_attention, verify_attention_reference])
def test_refusals_of_an_idle_batch(name: str, operation: Any) -> None:
    """With no request too: what is wrong now would be wrong with the next."""
    changes, argument, text = IDLE[name]
    a = base()
    idle = {"prefix_lens": a["prefix_lens"][:0], "row_ids": a["row_ids"][:0]}
    assert operation(**{**a, **idle}).shape == (9, 4, 6)
    refused(operation, {**a, **idle, **changes}, argument, text)


DRAFT = {
    "topk 0": ({"topk": 0}, "topk", "at least 1"),
    "topk against draft_slots": ({"topk": 3}, "draft_slots", "[2, 3, steps]"),
    "step -1": ({"step": -1}, "step", "at least 0"),
    "step beyond": ({"step": 2}, "step", "less than the 2 steps"),
    "draft_slots float": ({"draft_slots": torch.zeros(2, 4, 2)}, "draft_slots", "float32"),
    "draft_slots bs": ({"draft_slots": torch.zeros(1, 4, 2, dtype=INT64)}, "draft_slots", "[2, 4, steps]"),
    "draft_slots None": ({"draft_slots": None}, "draft_slots", "NoneType"),
    "table narrow": ({"prefix_lens": torch.tensor([5, 60])}, "table", "60 or more"),
}


@pytest.mark.parametrize("name", DRAFT)
@pytest.mark.parametrize("operation", [draft_decode_attention, draft_decode_attention_reference])
def test_draft_refusals(name: str, operation: Any) -> None:
    changes, argument, text = DRAFT[name]
    c = Config(q_heads=4, kv_heads=2, v_head_dim=6, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    refused(operation, {**build_draft(c, topk=4, step=0, steps=2), **changes}, argument, text)


@pytest.mark.parametrize("operation", [draft_decode_attention, draft_decode_attention_reference])
def test_refusals_of_idle_branches(operation: Any) -> None:
    c = Config(q_heads=4, kv_heads=2, v_head_dim=6, q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    a = build_draft(c, topk=4, step=0, steps=2)
    idle = {**a, "prefix_lens": a["prefix_lens"][:0], "row_ids": a["row_ids"][:0], "draft_slots": a["draft_slots"][:0]}
    assert operation(**idle).shape[0] == len(a["q"])
    refused(operation, {**idle, "draft_slots": "x"}, "draft_slots", "str")
    refused(operation, {**idle, "step": 2}, "step", "less than the 2 steps")


def test_too_few_rows_for_the_branches() -> None:
    a = build_draft(Config(), topk=3, step=0, steps=1)
    with pytest.raises(ArgumentError, match=r"topk: got 6 query rows in all; allowed: at most the 5 rows of q"):
        draft_decode_attention(**{**a, "q": a["q"][:5]})


@pytest.mark.parametrize(
    ("page_size", "length", "w", "pages"), [(16, 63, 4, 5), (16, 63, 1, 4), (16, 64, 1, 5), (1, 63, 4, 67), (64, 63, 2, 2)]
)
def test_table_width_near_the_context_limit(page_size: int, length: int, w: int, pages: int) -> None:
    """Context 64, L 63: prefix and drafts need their last page; one column less is an error before any work."""
    a = build_verify(Config(prefix_lens=(length,), widths=w, page_size=page_size))
    enough = {**a, "table": a["table"][:, :pages]}
    assert verify_attention(**enough).isfinite().all()
    with pytest.raises(ArgumentError, match=f"table: got {pages - 1} columns; allowed: {pages} or more"):
        verify_attention(**{**a, "table": a["table"][:, : pages - 1]})


@pytest.mark.parametrize("bad", [-1, 10**6])
@pytest.mark.parametrize("page_size", [1, 4])
def test_slot_outside_the_cache(bad: int, page_size: int) -> None:
    """Where a visible key needs it, it is named; where only the window's outside has it, it is not even read."""
    a = build_verify(Config(seed=1, prefix_lens=(9, 12), page_size=page_size))
    a["table"] = a["table"].clone()
    a["table"][a["row_ids"][1], 0] = bad
    with pytest.raises(ArgumentError, match=r"table: got slot .* for a visible key"):
        verify_attention(**a)
    assert verify_attention(**{**a, "window": 5}).isfinite().all()


def test_draft_slot_outside_the_cache() -> None:
    a = build_draft(Config(), topk=2, step=0, steps=1)
    a["draft_slots"][1, 1, 0] = -1
    with pytest.raises(ArgumentError, match="draft_slots: got slot -1 for a visible key"):
        draft_decode_attention(**a)


def test_slot_map_entry_outside_the_cache() -> None:
    a = build_verify(Config(slot_map=True))
    a["slot_map"] = a["slot_map"].clamp(max=-1)
    with pytest.raises(ArgumentError, match="slot_map: got slot -1 for a visible key"):
        verify_attention(**a)


@pytest.mark.parametrize(
    ("kind", "ragged"), [("chain", False), ("chain", True), ("qlen_only", False), ("full_mask", False), ("full_mask", True)]
)
def test_checks_look_at_no_value_off_the_cpu(kind: str, ragged: bool) -> None:
    """Meta tensors hold no values: a check that looked would fail. A GPU would wait at the same place."""
    c = Config(kind=kind, widths=(3, 4) if ragged else 4, window=3, sinks=True, k_scale="heads", slot_map=True)
    a = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in build_verify(c).items()}
    rest = {"num_draft_tokens": None, "q_offsets": None, "mask": None, "mask_layout": "qlen_only", "mask_offsets": None,
            "positions": None, "deterministic": False, "out": None, "lse": None, "return_lse": True}  # fmt: skip
    problem = check_verify(VerifyArguments(**{**rest, **a}))
    assert (problem.kind, problem.batch, problem.queries, problem.ragged) == (kind, 2, None if ragged else 4, ragged)
    with pytest.raises(SpecverifyError, match="no kernel for meta tensors"):
        verify_attention(**a)


def test_variants() -> None:
    """On a CPU without the interpreter; `test_variants.py` covers the choice itself."""
    for name in ("auto", "reference"):
        assert torch.equal(verify_attention(**base(), variant=name), verify_attention_reference(**base(), variant=name))
    for name in ("fused", "fused_split"):
        with pytest.raises(SpecverifyError, match=f"variant {name} cannot serve this call: its tensors lie on the CPU"):
            verify_attention(**base(), variant=name)


@pytest.mark.parametrize(
    "name", ["prefix_lens", "row_ids", "q_offsets", "mask_offsets", "positions", "sinks", "k_scale", "v_scale"]
)
def test_strided_vectors_are_refused(name: str) -> None:
    """A kernel reads them as neighbours; every other entry would be another request's."""
    c = Config(
        kind="full_mask",
        widths=(3, 4),
        q_heads=4,
        kv_heads=2,
        v_head_dim=6,
        sinks=True,
        k_scale="heads",
        v_scale="heads",
        window=3,
    )
    a = build_verify(c)
    a[name] = a[name].repeat_interleave(2)[::2]
    refused(verify_attention, a, name, "last stride 1")


def test_error_survives_a_process_border() -> None:
    with pytest.raises(ArgumentError) as raised:
        verify_attention(**{**base(), "window": -2})
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.argument) == (str(raised.value), "window")
