"""Scores far from 0, caps, sinks, FP8 values and scales, head shapes, offsets past 2**31."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sglang_specverify.kernels import draft_decode_attention, verify_attention

from . import oracle
from .cases import Config, build_verify


def one_row(scores: list[float], values: list[float], **arguments: Any) -> tuple[float, float]:
    """Output and LSE of one query of one head whose scores against a prefix and itself are given: D 1, Dv 1, q 1."""
    n = len(scores)
    k = torch.tensor(scores, dtype=torch.float64).view(n, 1, 1)
    v = torch.tensor(values, dtype=torch.float64).view(n, 1, 1)
    lse = torch.empty(1, 1, dtype=torch.float64)
    out = verify_attention(
        torch.ones(1, 1, 1, dtype=torch.float64), k, v, torch.arange(n).int()[None], torch.zeros(1, dtype=torch.int32),
        torch.tensor([n - 1]), num_draft_tokens=1, lse=lse, **{"sm_scale": 1.0, **arguments},
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return float(out[0, 0, 0]), float(lse[0, 0])


@pytest.mark.parametrize("score", [-76800.0, -1e30, -88.0, 0.0, 88.0, 710.0, 76800.0, 1e30])
def test_one_key_at_any_score(score: float) -> None:
    """No finite number stands for -inf: one key has weight 1 and is its own LSE."""
    assert one_row([score], [3.0]) == (3.0, score)


@pytest.mark.parametrize("score", [-76800.0, -1000.0, 1000.0, 76800.0])
@pytest.mark.parametrize("n", [2, 5])
def test_equal_keys_at_any_score(score: float, n: int) -> None:
    out, lse = one_row([score] * n, [float(i) for i in range(n)])
    assert out == pytest.approx((n - 1) / 2, rel=1e-12)
    assert lse == pytest.approx(score + math.log(n), rel=1e-15)


@pytest.mark.parametrize("sink", [-math.inf, -1e5, -3.0, 0.0, 3.0, 800.0, 1e5])
@pytest.mark.parametrize("score", [-76800.0, 0.0, 5.0, 76800.0])
def test_sink_is_in_the_denominator_and_not_in_the_lse(score: float, sink: float) -> None:
    out, lse = one_row([score], [2.0], sinks=torch.tensor([sink]))
    share = 1 / (1 + math.exp(min(sink - score, 700.0)))
    assert out == pytest.approx(2.0 * share, rel=1e-9, abs=1e-200)
    assert lse == score


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["qlen_only", "full_mask"])
def test_row_that_sees_nothing(kind: str, sinks: bool) -> None:
    """An empty prefix and no draft: two empty states together are 0 and -inf, never NaN; its neighbours are not touched."""
    a = build_verify(Config(seed=1, prefix_lens=(0, 3), widths=4, kind=kind, sinks=sinks, q_dtype=torch.bfloat16))
    if kind == "qlen_only":
        a["mask"][0, 1] = False
    else:
        a["mask"][4:8] = False
    out, lse = verify_attention(**a, return_lse=True)
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert out.isfinite().all() and lse[[0, 2, 3, 4, 5, 6, 7]].isfinite().all()
    oracle.assert_matches(out, lse, oracle.verify(a))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("w", [1, 3])
def test_request_that_sees_nothing_is_written_too(w: int, sinks: bool) -> None:
    """Buffers of an earlier step: all rows of a blind request become 0 and -inf."""
    a = build_verify(Config(seed=2, prefix_lens=(0, 3), widths=w, kind="qlen_only", sinks=sinks))
    a["mask"][0] = False
    out, lse = torch.full((2 * w, 2, 8), torch.nan).double(), torch.full((2 * w, 2), torch.nan)
    verify_attention(**a, out=out, lse=lse)
    assert not out[:w].any() and (lse[:w] == -torch.inf).all()
    oracle.assert_matches(out, lse, oracle.verify(a))


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("k_scale", [1.0, 0.5])
def test_cap_then_mask(cap: float, k_scale: float) -> None:
    """Scores up to 168: capped with k_scale inside, and a masked key stays masked however the cap bounds it."""
    scores = [168.0, -168.0, 20.0, 7.0]
    a: dict[str, Any] = {
        "q": torch.ones(1, 1, 1, dtype=torch.float64),
        "k_cache": torch.tensor([*scores, 500.0]).double().view(5, 1, 1),
        "v_cache": torch.eye(5).double()[:, None],
        "table": torch.tensor([[0, 1, 2, 4]], dtype=torch.int32),
        "row_ids": torch.zeros(1, dtype=torch.int32),
        "prefix_lens": torch.tensor([3]),
        "num_draft_tokens": 1,
        "mask": torch.zeros(1, 1, 1, dtype=torch.bool),
        "softcap": cap,
        "k_scale": k_scale,
        "sm_scale": 1.0,
    }
    lse = torch.empty(1, 1, dtype=torch.float64)
    out = verify_attention(**a, lse=lse)
    weights = [math.exp(cap * math.tanh(s * k_scale / cap)) for s in scores[:3]]
    want = torch.tensor([*(w / sum(weights) for w in weights), 0.0, 0.0]).double()
    torch.testing.assert_close(out[0, 0], want, rtol=1e-6, atol=1e-12)
    assert float(lse) == pytest.approx(math.log(sum(weights)), rel=1e-12)
    oracle.assert_matches(out, lse, oracle.verify(a))


def fp8_value(code: int, exponent_bits: int, mantissa_bits: int, bias: int, fnuz: bool) -> float:
    """The number that an FP8 code stands for, from the format's definition."""
    if fnuz and code == 0x80:
        return math.nan
    sign = -1.0 if code & 0x80 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if not fnuz and exponent == (1 << exponent_bits) - 1:
        if exponent_bits == 5:
            return sign * math.inf if mantissa == 0 else math.nan
        if mantissa == (1 << mantissa_bits) - 1:
            return math.nan
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))


FP8_FORMATS = {
    torch.float8_e4m3fn: (4, 3, 7, False),
    torch.float8_e5m2: (5, 2, 15, False),
    torch.float8_e4m3fnuz: (4, 3, 8, True),
    torch.float8_e5m2fnuz: (5, 2, 16, True),
}


@pytest.mark.parametrize("dtype", FP8_FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("v_scale", [1.0, 2.0])
def test_every_fp8_code_is_dequantised_exactly(dtype: torch.dtype, v_scale: float) -> None:
    """256 requests that see one key each: the output is the code's value times v_scale, the LSE its value as K."""
    cache = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).view(dtype)
    q = torch.ones(256, 1, 1, dtype=torch.float64)
    ids = torch.arange(256, dtype=torch.int32)
    out, lse = torch.empty(256, 1, 1, dtype=torch.float64), torch.empty(256, 1, dtype=torch.float64)
    zeros = torch.zeros(256, dtype=torch.int32)
    verify_attention(q, torch.zeros(256, 1, 1), cache, ids[:, None], ids, zeros, num_draft_tokens=1, v_scale=v_scale, out=out)
    verify_attention(q, cache, torch.zeros(256, 1, 1), ids[:, None], ids, zeros, num_draft_tokens=1, k_scale=0.5, lse=lse)
    values = torch.tensor([fp8_value(code, *FP8_FORMATS[dtype]) for code in range(256)], dtype=torch.float64)
    torch.testing.assert_close(out.flatten(), values * v_scale, rtol=0, atol=0, equal_nan=True)
    finite = values.isfinite()
    assert torch.equal(lse.flatten()[finite], values[finite] * 0.5)


@pytest.mark.parametrize("dtype", FP8_FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("scales", [(0.5, 2.0), ("scalar", "scalar"), ("heads", "heads"), ("heads", 1.0)])
def test_fp8_scales(dtype: torch.dtype, scales: tuple[Any, Any]) -> None:
    """The same as dequantised caches: k_scale and v_scale multiplied in beforehand."""
    c = Config(seed=2, kv_heads=2, q_heads=6, cache_dtype=dtype, k_scale=scales[0], v_scale=scales[1], softcap=2.0, sm_scale=1.0)
    a = build_verify(c)
    plain = dict(a)
    for cache, name in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        scale = torch.as_tensor(a[name], dtype=torch.float64)
        plain[cache], plain[name] = a[cache].double() * scale.reshape(-1, 1), 1.0
    torch.testing.assert_close(verify_attention(**a), verify_attention(**plain), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("shape", [(192, 128), (576, 512), (64, 192), (1, 2)])
def test_v_head_dim_of_its_own(shape: tuple[int, int]) -> None:
    c = Config(seed=3, prefix_lens=(3, 0), widths=2, kind="qlen_only", head_dim=shape[0], v_head_dim=shape[1], strided=True)
    a = build_verify(c)
    out, lse = verify_attention(**a, return_lse=True)
    assert out.shape == (4, 2, shape[1])
    oracle.assert_matches(out, lse, oracle.verify(a))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 16])
def test_head_dims_and_ratios(head_dim: int, group: int) -> None:
    """Odd ratios too: no query head reads the next KV head."""
    c = Config(seed=4, prefix_lens=(2,), widths=1, kv_heads=2, q_heads=2 * group, head_dim=head_dim, v_head_dim=4)
    a = build_verify(c.but(q_dtype=torch.bfloat16, cache_dtype=torch.bfloat16))
    out, lse = verify_attention(**a, return_lse=True)
    oracle.assert_matches(out, lse, oracle.verify(a))
    other = {**a, "k_cache": a["k_cache"].clone(), "v_cache": a["v_cache"].clone()}
    other["k_cache"][:, 1], other["v_cache"][:, 1] = torch.nan, torch.nan
    assert torch.equal(verify_attention(**other)[:, :group], out[:, :group])


@pytest.mark.parametrize("head", [0, 1])
def test_offsets_past_2_31(head: int) -> None:
    """A pool whose last slot starts past 2**31 elements (never touched memory between) gives the same bits as a dense one."""
    dense = build_verify(Config(seed=5, prefix_lens=(1,), widths=2, kv_heads=2, cache_dtype=torch.float8_e4m3fn))
    count, heads, dim = dense["k_cache"].shape
    stride = 2**31 // (count - 2) + 64
    storage = torch.empty(count * stride, dtype=torch.uint8).view(torch.float8_e4m3fn)
    far = {**dense}
    for name, shift in (("k_cache", 0), ("v_cache", 4096)):
        strides = (stride, dim, 1) if head == 0 else (stride, 512, 1)
        view = storage[shift:].as_strided((count, heads, dim), strides, storage.storage_offset() + shift)
        view.copy_(dense[name])
        far[name] = view
    assert max(dense["table"].max().item(), 2) * stride > 2**31
    assert torch.equal(verify_attention(**far), verify_attention(**dense))


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_do_not_depend_on_their_mates(deterministic: bool) -> None:
    """bs 2, W 5, L [7, 11], and more: each request is bit-equal to its run alone, and at any place in the batch."""
    c = Config(seed=6, prefix_lens=(7, 11, 0, 40), widths=5, kind="qlen_only", q_dtype=torch.bfloat16)
    a = {**build_verify(c), "deterministic": deterministic}
    whole = verify_attention(**a).view(4, 5, 2, 8)

    def some(requests: list[int]) -> torch.Tensor:
        rows = [r * 5 + i for r in requests for i in range(5)]
        part = {name: a[name][requests] for name in ("row_ids", "prefix_lens", "mask")}
        return verify_attention(**{**a, **part, "q": a["q"][rows], "positions": a["positions"][rows]}).view(-1, 5, 2, 8)

    for requests in ([0], [1], [2], [3], [3, 1], [1, 0, 2, 3], [2, 2, 2]):
        assert torch.equal(some(requests), whole[requests])


def test_draft_rows_do_not_depend_on_their_mates() -> None:
    from .cases import build_draft

    a = build_draft(Config(seed=7, prefix_lens=(7, 11), q_dtype=torch.bfloat16), topk=2, step=2, steps=3)
    whole = draft_decode_attention(**a)
    for r in range(2):
        part = {name: a[name][r : r + 1] for name in ("row_ids", "prefix_lens", "draft_slots")}
        alone = draft_decode_attention(**{**a, **part, "q": a["q"][2 * r : 2 * r + 2]})
        assert torch.equal(alone, whole[2 * r : 2 * r + 2])
