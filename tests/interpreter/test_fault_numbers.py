"""Faults of numbers and shapes, as kinds; `test_faults.py` has the table of all and the others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.kernels.launch import AMD_OPTIONS, LaunchConfig
from tests.kernels.cases import Config, build_draft, build_verify

from .bounds import compare
from .calls import call, check, copy_of, launches, to_device

BF16 = {"q_dtype": torch.bfloat16, "cache_dtype": torch.bfloat16}


def one_key(score: float, device: str, **options: Any) -> dict[str, Any]:
    """One query of one head that sees one key with this score: q is 16 times 1, k is score / 16, both exact in bf16."""
    return to_device(
        {
            "q": torch.ones(1, 1, 16, dtype=torch.bfloat16),
            "k_cache": torch.full((1, 1, 16), score / 16, dtype=torch.bfloat16),
            "v_cache": torch.arange(1, 17, dtype=torch.bfloat16).view(1, 1, 16),
            "table": torch.zeros(1, 1, dtype=torch.int32),
            "row_ids": torch.zeros(1, dtype=torch.int32),
            "prefix_lens": torch.zeros(1, dtype=torch.int32),
            "num_draft_tokens": 1,
            "sm_scale": 1.0,
            **options,
        },
        device,
    )


def spacing(value: float) -> float:
    """The distance of neighbouring FP32 numbers at `value`."""
    return 2.0 ** (math.frexp(value)[1] - 24) if value else 0.0


@pytest.mark.parametrize("score", [-76800.0, -(2.0**100), -88.0, 0.0, 88.0, 2.0**10, 76800.0, 2.0**100])
def test_one_key_at_any_score(device: str, score: float) -> None:
    """No finite number stands for -inf: one key has weight 1, and its score is the LSE.

    The LSE goes to base 2 and back, and stays within one spacing of FP32 numbers there.
    """
    a = one_key(score, device)
    out, lse = call(a)
    assert torch.equal(out.cpu(), a["v_cache"].cpu())
    assert abs(lse.item() - score) <= spacing(score)


@pytest.mark.parametrize("score", [-76800.0, 0.0, 76800.0])
@pytest.mark.parametrize("sink", [-math.inf, -76900.0, 0.0, 76900.0, math.inf])
def test_one_key_and_a_sink(device: str, sink: float, score: float) -> None:
    """Sinks far above and far below every score, and none: -inf."""
    a = one_key(score, device, sinks=torch.tensor([sink]))
    out, lse = call(a)
    share = 1.0 if sink < score else 0.5 if sink == score else 0.0
    assert torch.equal(out.cpu(), (a["v_cache"].cpu() * share))
    assert abs(lse.item() - score) <= spacing(score)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["qlen_only", "full_mask"])
@pytest.mark.parametrize("variant", ["fused", "fused_split"])
def test_blind_rows(device: str, variant: str, kind: str, sinks: bool) -> None:
    """Rows and whole requests that see nothing: 0 and -inf, whatever the buffers held, and their neighbours are served."""
    c = Config(seed=11, prefix_lens=(0, 3, 0), widths=4, kind=kind, sinks=sinks, head_dim=16, v_head_dim=16, **BF16)
    a = to_device(build_verify(c), device)
    mask = copy_of(a, "mask")
    if kind == "qlen_only":
        mask[0, 1], mask[2] = False, False
    else:
        first, second = a["mask_offsets"].tolist()[1:3]
        mask[4:8], mask[second : second + 16] = False, False
        assert first == 16
    out, lse = call(a, variant=variant)
    for row in (1, 8, 9, 10, 11):
        assert not out[row].any() and (lse[row] == -math.inf).all()
    check(a, variant=variant)


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("k_scale", [1.0, 0.5, "tensor"])
@pytest.mark.parametrize("masked", [0.0, 500.0, -500.0])
def test_cap_then_mask(device: str, masked: float, k_scale: Any, cap: float) -> None:
    """Scores up to 168: capped with k_scale inside, and a masked key stays masked although the cap would bound it."""
    scores = torch.tensor([168.0, -168.0, 20.0, 7.0])
    k = torch.cat([scores, torch.tensor([masked])])[:, None, None].expand(5, 1, 16) / 16
    a = one_key(0.0, device)
    a |= to_device(
        {
            "k_cache": k.bfloat16().contiguous(),
            "v_cache": torch.eye(5, 16)[:, None].bfloat16(),
            "table": torch.tensor([[0, 1, 2, 3, 4]], dtype=torch.int32),
            "prefix_lens": torch.tensor([4]),
            "mask": torch.zeros(1, 1, 1, dtype=torch.bool),
            "k_scale": torch.tensor(0.5) if k_scale == "tensor" else k_scale,
        },
        device,
    )
    a["softcap"] = cap
    out, lse = call(a)
    compare(a, out, lse)
    assert not out[0, 0, 4:].any(), "the masked key has weight"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_fp8_code_as_a_value(device: str, q_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """256 requests that see one key each: the output is exactly the code's number, NaN and infinity included."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    if device == "cpu":
        codes = codes.view(torch.uint8)[::3].contiguous().view(dtype)  # 20 ms a request
    n = len(codes)
    ids = torch.arange(n, dtype=torch.int32)
    a = {
        "q": torch.zeros(n, 1, 16, dtype=q_dtype), "k_cache": torch.zeros(n, 1, 16).to(dtype),
        "v_cache": codes.view(torch.uint8)[:, None, None].expand(n, 1, 16).contiguous().view(dtype), "table": ids[:, None],
        "row_ids": ids, "prefix_lens": torch.zeros(n, dtype=torch.int32), "num_draft_tokens": 1,
    }  # fmt: skip
    out, _ = call(to_device(a, device))
    want = codes.double()
    torch.testing.assert_close(out[:, 0, 3].double().cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scales", [(0.5, 2.0), ("scalar", "scalar"), ("heads", "heads"), (1.0, "heads")])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_scales(device: str, dtype: torch.dtype, scales: tuple[Any, Any]) -> None:
    c = Config(seed=12, kv_heads=2, q_heads=6, cache_dtype=dtype, q_dtype=torch.bfloat16, k_scale=scales[0], v_scale=scales[1],
               softcap=2.0, sm_scale=1.0, head_dim=16, v_head_dim=16)  # fmt: skip
    a = to_device(build_verify(c), device)
    out, lse = call(a)
    compare(a, out, lse)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(AssertionError, match="times its bound"):
            compare({**a, name: a[name] * 1.25}, out, lse)


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "q", "out"])
@pytest.mark.parametrize("kind", ["chain", "branches"])
def test_offsets_past_2_31(device: str, kind: str, name: str) -> None:
    """A tensor whose last row starts past 2**31 elements gives the bits of a dense one. Memory between is never touched."""
    c = Config(seed=13, prefix_lens=(1, 2), widths=2, kv_heads=2, q_heads=4, head_dim=16, v_head_dim=16, page_size=1, **BF16)
    c = replace(c, cache_dtype=torch.float8_e4m3fn)
    a = to_device(build_draft(c, topk=2, step=0, steps=1) if kind == "branches" else build_verify(c), device)
    want = call(a)
    dense = torch.empty_like(want[0]) if name == "out" else a[name]
    rows = len(dense)
    used = int(a["table"].max()) if name.endswith("cache") else 3
    stride = 2**31 // used + 64
    storage = torch.empty((rows - 1) * stride + 4096, dtype=dense.dtype, device=device)
    far = storage.as_strided(dense.shape, (stride, *dense.stride()[1:]))
    for row in range(rows):
        far[row] = dense[row]
    assert used * stride >= 2**31
    if name == "out":
        got = call(a, out=far)
        assert torch.equal(far, want[0]) and torch.equal(got[1], want[1])
        return
    got = call({**a, name: far})
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("option", AMD_OPTIONS)
def test_launch_options(option: str) -> None:
    """AMD's options reach AMD only."""
    config = LaunchConfig(64, 64, 4, 2, amd=((option, 1),))
    assert option in config.options("gfx950") and option in config.options("gfx942")
    for arch in ("sm_90", "sm_100", "sm_103", "sm_107", "none"):
        assert option not in config.options(arch)


def test_a_launch_here_has_the_options_of_this_machine(device: str) -> None:
    a = to_device(build_verify(Config(seed=14, head_dim=16, v_head_dim=16, **BF16)), device)
    with launches() as seen:
        call(a)
    assert seen
    if device == "cpu" or torch.version.hip is None:
        assert not set(AMD_OPTIONS) & {name for launch in seen for name in launch.options}


@pytest.mark.parametrize("dims", [(576, 512), (320, 64), (64, 320)])
def test_wide_heads_are_refused(device: str, dims: tuple[int, int]) -> None:
    """Head dims that the kernel does not hold: a reason, and never a launch."""
    a = to_device(build_verify(Config(seed=15, head_dim=dims[0], v_head_dim=dims[1], **BF16)), device)
    with launches() as seen, pytest.raises(SpecverifyError, match=f"head dims {dims[0]} and {dims[1]}"):
        call(a)
    assert not seen


@pytest.mark.parametrize("group", [1, 3, 5, 7, 16])
@pytest.mark.parametrize("head_dim", [24, 80])
def test_next_kv_head(device: str, head_dim: int, group: int) -> None:
    """Padding of heads and head dims never reaches the next KV head: NaN there changes nothing before it."""
    c = Config(seed=16, prefix_lens=(2, 17), widths=3, kind="qlen_only", kv_heads=2, q_heads=2 * group, head_dim=head_dim,
               v_head_dim=head_dim, **BF16)  # fmt: skip
    a = to_device(build_verify(c), device)
    want = call(a)
    for name in ("k_cache", "v_cache"):
        copy_of(a, name)[:, 1] = torch.nan
    got = call(a)
    assert torch.equal(got[0][:, :group], want[0][:, :group]) and torch.equal(got[1][:, :group], want[1][:, :group])


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("gap", [1, 24])
def test_strided_pages(device: str, gap: int, page_size: int) -> None:
    """Tokens at a stride larger than a head's data, as in caches that hold more than one thing a token."""
    c = Config(seed=17, prefix_lens=(33, 5), widths=3, page_size=page_size, head_dim=16, v_head_dim=16, kv_heads=2, **BF16)
    a = to_device(build_verify(c), device)
    want = call(a)
    for name in ("k_cache", "v_cache"):
        slots, heads, dim = a[name].shape
        wide = torch.full((slots, heads + 1, dim + gap), torch.nan, dtype=a[name].dtype, device=device)
        wide[:, :heads, :dim] = a[name]
        a[name] = wide[:, :heads, :dim]
    got = call(a)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
