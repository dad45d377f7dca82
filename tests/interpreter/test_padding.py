"""Poison everywhere that nobody may look or write: padding rows, padded requests, unseen slots, table entries, outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels import oracle
from tests.kernels.cases import Config, build_draft, build_verify

from .bounds import compare
from .calls import call, check, copy_of, guarded, guarded_lse, launches, to_device
from .plans import block_n, divided, even

BASE = Config(
    prefix_lens=(33, 15, 0, 50), widths=3, kind="qlen_only", q_heads=2, kv_heads=1, head_dim=24, v_head_dim=24, page_size=16,
    q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
)  # fmt: skip

MASKS = ["chain", "qlen_only", "full_mask"]


def build(c: Config, device: str) -> dict[str, Any]:
    return to_device(build_draft(c, topk=3, step=1, steps=3) if c.kind == "branches" else build_verify(c), device)


def split_options(a: dict[str, Any], parts: int) -> dict[str, Any]:
    """Options that divide every prefix into `parts`, or none for 1."""
    if parts == 1:
        return {}
    align = block_n(a)
    return {"variant": "fused_split", "plan": divided(a, [even(n, parts, align) for n in a["prefix_lens"].tolist()])}


@pytest.mark.parametrize("kind", [*MASKS, "branches"])
@pytest.mark.parametrize("with_out", [False, True])
def test_idle_batch(device: str, kind: str, with_out: bool) -> None:
    """bs 0: the outputs come back, nothing was launched and nothing written."""
    a = build(BASE.but(kind="branches" if kind == "branches" else "chain", prefix_lens=(), pad_rows=4), device)
    a["prefix_lens"] = a["prefix_lens"].int()
    if kind == "qlen_only":
        a["mask"] = torch.zeros(0, 3, 3, dtype=torch.bool, device=device)
    elif kind == "full_mask":
        a |= {"mask": torch.zeros(0, dtype=torch.bool), "mask_offsets": torch.zeros(1, dtype=torch.int64)}
        a = to_device({**a, "mask_layout": "full_mask"}, device)
    for variant in ("fused", "fused_split", "auto"):
        out = guarded(4, 2, 24, torch.bfloat16, device, strided=True)
        with launches() as seen:
            got, lse = call(a, variant=variant, out=out.view if with_out else None)
        assert not seen
        assert got.shape == (4, 2, 24) and lse.shape == (4, 2)
        assert out.untouched(torch.zeros(4, dtype=torch.bool, device=device))
        if with_out:
            assert got is out.view
        else:
            assert not got.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(("rows", "requests", "w"), [(232, 38, 6), (7, 2, 3), (5, 1, 4), (6, 2, 3), (40, 2, 17)])
@pytest.mark.parametrize("kind", MASKS)
def test_row_count_that_is_no_multiple_of_w(device: str, kind: str, rows: int, requests: int, w: int) -> None:
    lens = tuple(i % 4 for i in range(requests))
    a = build(BASE.but(prefix_lens=lens, widths=w, kind=kind, pad_rows=rows - requests * w, page_size=1, q_heads=2), device)
    copy_of(a, "q")[requests * w :] = torch.nan
    check(a)


@pytest.mark.parametrize("kind", [*MASKS, "branches"])
def test_new_outputs_say_no_key_in_padding_rows(device: str, kind: str) -> None:
    a = build(BASE.but(kind=kind, pad_rows=3), device)
    copy_of(a, "q")[-3:] = torch.nan
    out, lse = call(a)
    compare(a, out, lse)
    assert not out[-3:].any() and (lse[-3:] == -torch.inf).all()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("padded_len", [0, 1])
@pytest.mark.parametrize("kind", ["chain", "qlen_only"])
def test_padded_requests_change_nothing(device: str, kind: str, padded_len: int, parts: int) -> None:
    """A graph's spare requests: prefix 0, or 1 with row 0, any slots that exist. The real ones are equal to the bit."""
    a = build(BASE.but(kind=kind), device)
    want = call(a, **split_options(a, parts))
    padded = {
        "q": torch.cat([a["q"], torch.full((6, 2, 24), torch.nan, dtype=torch.bfloat16, device=device)]),
        "table": torch.cat([torch.zeros(1, a["table"].shape[1], dtype=torch.int32, device=device), a["table"]]),
        "row_ids": torch.cat([a["row_ids"] + 1, torch.zeros(2, dtype=torch.int32, device=device)]),
        "prefix_lens": torch.cat([a["prefix_lens"], torch.full((2,), padded_len, device=device)]),
    }
    if kind == "qlen_only":
        padded["mask"] = torch.cat([a["mask"], torch.zeros(2, 3, 3, dtype=torch.bool, device=device)])
        padded["positions"] = torch.cat([a["positions"], torch.zeros(6, dtype=torch.int64, device=device)])
    b = {**a, **padded}
    got = call(b, **split_options(b, parts))
    assert torch.equal(got[0][:12], want[0]) and torch.equal(got[1][:12], want[1])


@pytest.mark.parametrize(
    ("kind", "cache", "poison", "parts"),
    [
        ("qlen_only", torch.bfloat16, torch.nan, 1),
        ("qlen_only", torch.bfloat16, torch.inf, 1),
        ("qlen_only", torch.bfloat16, -torch.inf, 3),
        ("qlen_only", torch.float8_e4m3fn, torch.nan, 1),
        ("qlen_only", torch.float8_e5m2, torch.nan, 1),
        ("chain", torch.bfloat16, torch.nan, 3),
        ("chain", torch.float8_e5m2, torch.inf, 1),
        ("branches", torch.bfloat16, torch.nan, 1),
        ("branches", torch.float8_e5m2, torch.inf, 3),
    ],
)
def test_poison_in_slots_that_nobody_sees(device: str, kind: str, cache: torch.dtype, poison: float, parts: int) -> None:
    """The rest of each last page and all unused pages: finite, and the same bits as with zeros there."""
    a = build(BASE.but(kind=kind, cache_dtype=cache), device)
    results = []
    for value in (poison, 0.0):
        b = dict(a)
        for name in ("k_cache", "v_cache"):
            full = a[name].float()
            assert full.isnan().any()
            b[name] = torch.where(full.isnan(), value, full).to(cache)
        results.append(call(b, **split_options(b, parts)))
        compare(b, *results[-1], splits=parts)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("kind", ["chain", "qlen_only", "branches"])
def test_poison_stays_in_its_request(device: str, kind: str, name: str, poison: float) -> None:
    """NaN or infinity in a visible key of one request reaches rows that see it, and no row of another request."""
    a = build(BASE.but(kind=kind), device)
    want = call(a)
    slot = oracle.slot_of(a, 0, 20)
    copy_of(a, name)[slot] = poison
    out, lse = call(a)
    assert not out[:3].isfinite().all(2).any(), "each row of the request sees this key"
    assert torch.equal(out[3:], want[0][3:]) and torch.equal(lse[3:], want[1][3:])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("kind", ["qlen_only", "branches"])
def test_poison_in_a_draft(device: str, kind: str, name: str, poison: float) -> None:
    """One draft is no number: nor is its own row. In K it reaches no sibling; in V siblings share its tile, requests do not."""
    a = build(BASE.but(kind=kind, prefix_lens=(20, 7)), device)
    if kind == "qlen_only":
        a["mask"] = torch.eye(3, dtype=torch.bool, device=device).repeat(2, 1, 1)
        slot = oracle.slot_of(a, 0, 21)
    else:
        slot = int(a["draft_slots"][0, 1, 0])
    want = call(a)
    copy_of(a, name)[slot] = poison
    out, _ = call(a)
    assert not out[1].isfinite().all()
    untouched = [0, 2, 3, 4, 5] if name == "k_cache" else [3, 4, 5]
    assert torch.equal(out[untouched], want[0][untouched])


@pytest.mark.parametrize("window", [0, 5, 16, 20])
@pytest.mark.parametrize("kind", [*MASKS, "branches"])
def test_poison_before_the_window(device: str, kind: str, window: int) -> None:
    """Positions that every row's window leaves behind: their slots hold NaN and their table entries are -1."""
    a = build(BASE.but(kind=kind, window=window, page_size=1), device)
    want = call(a)
    compare(a, *want)
    table = copy_of(a, "table")
    k, v = copy_of(a, "k_cache"), copy_of(a, "v_cache")
    for r, n in enumerate(a["prefix_lens"].tolist()):
        # The least position of a row is L; in draft decode it is L + step for all.
        first = n + (a["step"] if kind == "branches" else 0) - window
        for position in range(max(0, min(first, n))):
            slot = oracle.slot_of(a, r, position)
            k[slot], v[slot] = torch.nan, torch.nan
            table[int(a["row_ids"][r]), position] = -1
    got = call(a)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_table_entries_past_the_last_token(device: str) -> None:
    """Whatever stands after L + W in a row, or in rows of nobody, is not followed: slots out of any range."""
    a = build(BASE.but(page_size=1), device)
    want = call(a)
    table = copy_of(a, "table")
    table[table == -1] = 2**31 - 1
    got = call(a)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize(("kind", "parts"), [*((kind, 1) for kind in (*MASKS, "branches")), ("qlen_only", 2)])
def test_smaller_replays(device: str, kind: str, parts: int) -> None:
    """Fixed buffers for 4 requests, used with 4, then 1, then 3: each equals a run of its own; the rest keeps."""
    a = build(BASE.but(kind=kind), device)
    out, lse = guarded(12, 2, 24, torch.bfloat16, device, strided=False), guarded_lse(12, 2, device, layout="heads")
    call(a, **split_options(a, parts), out=out.view, lse=lse.view)
    for requests in (1, 3):
        before = out.view.clone(), lse.view.clone()
        a["q"] = a["q"].flip(0)
        b = first_requests(a, requests)
        rows = 3 * requests
        options = split_options(b, parts)
        call(b, **options, out=out.view, lse=lse.view)
        alone = call({**b, "q": b["q"][:rows].clone()}, **options)
        compare(b, out.view, lse.view, splits=parts)
        assert torch.equal(out.view[:rows], alone[0]) and torch.equal(lse.view[:rows], alone[1])
        assert not torch.equal(out.view[:rows], before[0][:rows])
        assert torch.equal(out.view[rows:], before[0][rows:]) and torch.equal(lse.view[rows:], before[1][rows:])
    everything = torch.ones(12, dtype=torch.bool, device=device)
    assert out.untouched(everything) and lse.untouched(everything)


def first_requests(a: dict[str, Any], count: int) -> dict[str, Any]:
    """The same buffers with fewer requests: a smaller replay."""
    part = {name: a[name][:count] for name in ("row_ids", "prefix_lens")}
    if "draft_slots" in a:
        part["draft_slots"] = a["draft_slots"][:count]
    elif a.get("mask") is not None and a["mask_layout"] == "qlen_only":
        part["mask"] = a["mask"][:count]
    elif a.get("mask") is not None:
        part["mask_offsets"] = a["mask_offsets"][: count + 1]
    return {**a, **part}


@pytest.mark.parametrize("kind", [*MASKS, "branches"])
def test_inputs_are_not_written(device: str, kind: str) -> None:
    a = build(BASE.but(kind=kind, window=3, sinks=True, slot_map=True, k_scale="heads"), device)
    before = {name: value.clone() for name, value in a.items() if isinstance(value, torch.Tensor)}
    call(a)
    for name, value in before.items():
        torch.testing.assert_close(a[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", MASKS)
def test_mask_bytes_past_the_entries_are_not_read(device: str, kind: str) -> None:
    """Guards of 0xAA after the last entry, and random bits in the columns of the prefix: neither changes a bit."""
    a = build(BASE.but(kind=kind, mask_dtype=torch.uint8, flat_mask=True), device)
    want = call(a)
    if kind != "chain":
        mask = copy_of(a, "mask")
        entries = 4 * 9 if kind == "qlen_only" else int(a["mask_offsets"][-1])
        assert (mask[entries:] == 0xAA).all()
        mask[entries:] = 0
        if kind == "full_mask":
            for r, n in enumerate(a["prefix_lens"].tolist()):
                at = int(a["mask_offsets"][r])
                mask[at : at + 3 * (n + 3)].view(3, n + 3)[:, :n] ^= 1
    got = call(a)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
