"""Every E2M1 code with every E4M3 scale, in each way that runs here, against the nearest E4M3 of the exact product."""

from __future__ import annotations

import pytest
import torch

from sglang_specverify.kernels.launch import arch_of
from sglang_specverify.kernels.sparse_mla.conversions import CONVERSIONS, conversions
from sglang_specverify.kernels.sparse_mla.rounding import fp4_as_e4m3

from .fp4_conversion import converting


def converted(how: str, device: str) -> torch.Tensor:
    """uint8 [16, 256]"""
    codes = torch.arange(16, dtype=torch.uint8, device=device).repeat_interleave(256)
    scales = torch.arange(256, dtype=torch.uint8, device=device).repeat(16)
    out = torch.full_like(codes, 0xA5)
    converting(codes, scales, out, how).run()
    return out.cpu().view(16, 256)


def here(device: str) -> tuple[str, ...]:
    if device == "cpu":
        return ("fp16", "integer")
    from triton.backends.nvidia.compiler import get_ptxas_version

    from sglang_specverify.kernels.sparse_mla.conversions import parse_ptxas_version

    arch = arch_of(torch.device(device))
    return conversions(arch, parse_ptxas_version(get_ptxas_version(int(arch[3:]))) if arch.startswith("sm_") else (0, 0))


@pytest.mark.parametrize("how", CONVERSIONS)
def test_every_code_with_every_scale(device: str, how: str) -> None:
    if how not in here(device):
        pytest.skip(f"{how} needs hardware or a ptxas that is not here")
    got, want = converted(how, device), fp4_as_e4m3()
    number = want & 0x7F != 0x7F
    assert int((~number).sum()) == 2 * 16, "scales of NaN"
    assert torch.equal(got[number], want[number])
    assert bool((got[~number] & 0x7F == 0x7F).all())
