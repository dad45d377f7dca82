"""The FP64 oracle of sparse MLA decode: against a second opinion, and what it counts as a key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels.sparse_mla.formats import DIM, decode_rows
from sglang_specverify.kernels.sparse_mla.quantize import deepseek_v41_quantize_cache
from sglang_specverify.kernels.sparse_mla.reference import Reference, reference_decode

from .sparse_mla_cases import build, poisoned, probe

CONTRACTS = ["exact", "e4m3"]


def e4m3_float(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    value = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -value if code & 0x80 else value


def nearest_e4m3(x: float) -> float:
    """By trying all codes; of two that are equally near the even one."""
    return min((abs(e4m3_float(code) - x), code & 1, e4m3_float(code)) for code in range(256) if code & 0x7F != 0x7F)[2]


def listed(a: dict[str, Any], b: int, s: int, contract: str) -> list[list[float]]:
    """The keys of a query row as Python floats, byte by byte, from block-split pages."""
    keys = []
    for name, row_bytes, per_scale in (("swa", 512, 32), ("main", 256, 16)):
        flat, page_rows = a[f"{name}_cache"], a[f"{name}_page_rows"]
        indices, lens = a[f"{name}_indices"], a[f"{name}_lens"]
        limit = (
            indices.shape[2]
            if lens is None
            else int(lens.view(len(indices), -1)[b, min(s, lens.view(len(indices), -1).shape[1] - 1)])
        )
        for i, slot in enumerate(indices[b, min(s, indices.shape[1] - 1)].tolist()):
            if i >= limit or not 0 <= slot < len(flat) * page_rows:
                continue
            page, row = flat[slot // page_rows].tolist(), slot % page_rows
            key = []
            for d in range(DIM):
                scale = page[page_rows * row_bytes + row * (DIM // per_scale) + d // per_scale]
                if name == "swa":
                    key.append(e4m3_float(page[row * 512 + d]) * 2.0 ** (scale - 127))
                else:
                    nibble = page[row * 256 + d // 2] >> 4 * (d % 2) & 15
                    value = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[nibble & 7] * (-1 if nibble & 8 else 1) * e4m3_float(scale)
                    key.append(nearest_e4m3(value) if contract == "e4m3" else value)
            keys.append(key)
    return keys


@pytest.mark.parametrize("contract", CONTRACTS)
def test_against_python_floats(contract: str) -> None:
    a = build(1, batch=2, queries=2, heads=2, window=3, topk=4, page_rows=4)
    a["swa_indices"][0, 0, 1], a["main_indices"][1, 1, 0] = -1, 10**6
    a |= {"swa_lens": torch.tensor([3, 2], dtype=torch.int32), "main_lens": torch.tensor([[4, 1], [-1, 9]])}
    # Values beyond 448 and below 2^-6, where the contracts part.
    a["main_cache"][:, 4 * 256 : 4 * 256 + 8] = torch.tensor([0x7E, 0x01, 0x70, 0x08, 0x3B, 0x7E, 0x02, 0x33])
    r = reference_decode(**a, bmm1_scale=0.3, bmm2_scale=-0.7, contract=contract)
    for b in range(2):
        for s in range(2):
            keys = listed(a, b, s, contract)
            assert int(r.valid[b, s].sum()) == len(keys)
            for h in range(2):
                q = a["q"][b, s, h].tolist()
                z = [0.3 * math.fsum(x * y for x, y in zip(q, key, strict=True)) for key in keys]
                top = max(z)
                lse = top + math.log(math.fsum(math.exp(x - top) for x in z))
                sink = float(a["sink"][h])
                total = max(lse, sink) + math.log1p(math.exp(-abs(lse - sink)))
                assert float(r.lse[b, s, h]) == pytest.approx(lse, rel=1e-12, abs=1e-12)
                w = [math.exp(x - total) for x in z]
                for d in (0, 1, 2, 15, 16, 33, 448, 511):
                    size = 0.7 * math.fsum(x * abs(key[d]) for x, key in zip(w, keys, strict=True))
                    got = [float(t[b, s, h, d]) for t in (r.out, r.sensitivity, r.underflow)]
                    want = -0.7 * math.fsum(x * key[d] for x, key in zip(w, keys, strict=True))
                    assert abs(got[0] - want) <= 1e-12 * size
                    assert got[1] == pytest.approx(size, rel=1e-12)
                    assert got[2] == pytest.approx(
                        0.7 * math.exp(top - total) * math.fsum(abs(key[d]) for key in keys), rel=1e-12
                    )


def read(r: Reference, s: int) -> list[int]:
    """The slots that query row s read, 256 and more for the main cache; each as often as it was read."""
    row = r.out[0, s, 0]
    counts = (row / row[row > 0].min()).round().long() if bool((row > 0).any()) else row.long()
    return [d for d, count in enumerate(counts.tolist()) for _ in range(count)]


INT32 = torch.int32
VISIBLE = [
    ({}, [[0, 3, 4, 11, 256, 261, 265], [1, 2, 9, 10, 262, 263, 264]]),
    ({"swa_lens": torch.tensor([2], dtype=INT32)}, [[0, 3, 256, 261, 265], [1, 2, 262, 263, 264]]),
    ({"swa_lens": torch.tensor([[2, 4]]), "main_lens": torch.tensor([[0, 1]])}, [[0, 3], [1, 2, 9, 10, 263]]),
    ({"swa_lens": torch.tensor([-3]), "main_lens": torch.tensor([99])}, [[256, 261, 265], [262, 263, 264]]),
    ({"swa_indices": torch.tensor([[[-1, 3, 12, -(2**31)], [2**31 - 1, 11, 0, -1]]], dtype=INT32)},
     [[3, 256, 261, 265], [0, 11, 262, 263, 264]]),
    ({"main_indices": torch.tensor([[[10, -2, 9], [9, 9, 0]]])}, [[0, 3, 4, 11, 265], [1, 2, 9, 10, 256, 265, 265]]),
    ({"main_indices": torch.tensor([[[1, 2]]])}, [[0, 3, 4, 11, 257, 258], [1, 2, 9, 10, 257, 258]]),
    ({"main_indices": None, "main_cache": None}, [[0, 3, 4, 11], [1, 2, 9, 10]]),
    ({"main_indices": torch.zeros(1, 2, 0, dtype=INT32), "main_cache": None}, [[0, 3, 4, 11], [1, 2, 9, 10]]),
    ({"swa_lens": torch.tensor([[0, 1]]), "main_indices": None}, [[], [1]]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "visible"), VISIBLE)
def test_which_keys_count(changes: dict[str, Any], visible: list[list[int]]) -> None:
    _, r = probe(**changes)
    assert [read(r, 0), read(r, 1)] == visible
    for s, slots in enumerate(visible):
        count = len(slots)
        assert int(r.valid[0, s].sum()) == count
        want = torch.full((2,), math.log(count) if count else -torch.inf, dtype=torch.float64)
        torch.testing.assert_close(r.lse[0, s], want, rtol=0, atol=1e-14)
        if not count:
            assert not r.out[0, s].any() and not r.sensitivity[0, s].any() and not r.underflow[0, s].any()


def test_bytes_of_rows_that_do_not_count_are_not_read() -> None:
    """Only valid rows are numbers; all the others, and the padding between pages, are NaN."""
    a, r = probe(main_lens=torch.tensor([[2, 3]]), swa_lens=torch.tensor([[4, 1]]))
    for name, rows, kind in (("swa", (0, 1, 3, 4, 11), "swa_mxfp8"), ("main", (0, 9, 6, 7, 8), "main_kv_fp4")):
        page_rows = a[f"{name}_page_rows"]
        full = decode_rows(a[f"{name}_cache"], torch.tensor(rows), kind, page_rows)
        slots = torch.tensor(rows)
        sparse = poisoned(kind, 3, page_rows)
        a[f"{name}_cache"] = deepseek_v41_quantize_cache(full.float(), kind, page_rows, sparse, slots)
    other = reference_decode(**a)
    assert torch.equal(other.out, r.out) and torch.equal(other.lse, r.lse)
    a["swa_lens"] = torch.tensor([[4, 2]])
    assert bool(reference_decode(**a).out[0, 1].isnan().all()), "negative control: a poisoned row that counts"


@pytest.mark.parametrize(("sink", "share"), [(-torch.inf, 1.0), (0.0, 7 / 8), (math.log(7), 0.5), (torch.inf, 0.0)])
def test_a_sink_takes_its_share_of_the_output_and_none_of_the_lse(sink: float, share: float) -> None:
    _, plain = probe()
    _, r = probe(sink=torch.tensor([sink, 0.0], dtype=torch.float64))
    torch.testing.assert_close(r.out[:, :, 0], plain.out[:, :, 0] * share, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(r.out[:, :, 1], plain.out[:, :, 1] * 7 / 8, rtol=1e-12, atol=1e-15)
    assert torch.equal(r.lse, plain.lse)
    assert bool(r.underflow.isfinite().all())


def test_sinks_of_empty_rows() -> None:
    for sink in (-torch.inf, 0.0, torch.inf):
        _, r = probe(sink=torch.tensor([sink, 0.0]), swa_lens=torch.tensor([0]), main_lens=torch.tensor([0]))
        assert not r.out.any() and bool((r.lse == -torch.inf).all())


@pytest.mark.parametrize("lens", [None, 133, 192])
def test_a_padded_window_from_pages_at_a_larger_stride(lens: int | None) -> None:
    """133 valid of 192 slots, the rest -1, no main rows: the list of 133 from a contiguous copy."""
    a = build(4, batch=1, heads=2, window=133, topk=1)
    a |= {"main_cache": None, "main_indices": None}
    want = reference_decode(**a)
    page_bytes = a["swa_cache"].shape[1]
    far = torch.full((len(a["swa_cache"]), page_bytes + 48), 0x7F, dtype=torch.uint8)
    far[:, :page_bytes] = a["swa_cache"]
    a["swa_cache"] = far[:, :page_bytes]
    a["swa_indices"] = torch.nn.functional.pad(a["swa_indices"], (0, 192 - 133), value=-1)
    a["swa_lens"] = None if lens is None else torch.tensor([lens])
    got = reference_decode(**a)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse) and int(got.valid.sum()) == 133


def test_large_scores_do_not_overflow() -> None:
    """One key of score -76800: out is the key, the LSE is the score."""
    a, _ = probe(swa_indices=torch.tensor([[[0], [0]]]), main_indices=None)
    a["q"] = torch.full_like(a["q"], -76800.0)
    r = reference_decode(**a, bmm1_scale=1.0)
    assert bool((r.lse == -76800).all())
    assert bool((r.out[..., 0] == 1).all()) and not r.out[..., 1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_q_is_taken_as_it_is(dtype: torch.dtype) -> None:
    a = build(3, batch=1, heads=2, window=4, topk=4, page_rows=4)
    a["q"] = a["q"].to(dtype)
    b = {**a, "q": a["q"].double()}
    assert torch.equal(reference_decode(**a).out, reference_decode(**b).out)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"contract": "fast"}, "contract: got 'fast'; allowed: exact or e4m3"),
        ({"q": torch.zeros(1, 2, 2, 256)}, "q: got shape"),
        ({"swa_cache": torch.zeros(3, 100, dtype=torch.uint8)}, "swa_cache: got pages of 100 bytes"),
        ({"swa_format": "fp8"}, "swa_format: got 'fp8'"),
        ({"main_layout": "rows"}, "main_layout: got 'rows'"),
        ({"main_page_rows": 0}, "main_page_rows: got 0"),
        ({"main_cache": None}, "main_cache: got NoneType"),
        ({"swa_indices": torch.zeros(1, 3, 4, dtype=INT32)}, "swa_indices: got shape"),
        ({"main_lens": torch.zeros(2, dtype=INT32)}, "main_lens: got shape"),
        ({"sink": torch.zeros(3)}, "sink: got shape"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        probe(**changes)
