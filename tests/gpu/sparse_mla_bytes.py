"""Whether the quantiser and the E4M3 conversion of DeepSeek-V4.1 rows give, on this GPU, the bytes that they give on a CPU.

    python -m tests.gpu.sparse_mla_bytes

Needs torch and Triton and nothing else; seconds. Prints a line for each comparison, and the SHA-256 of what went in and of what
came out: where the first is the same on two machines, so is the second. The exit code is 1 where a byte differs. Without a GPU it
runs in Triton's interpreter, if TRITON_INTERPRET=1.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from unittest import mock

import torch

from sglang_specverify.kernels.launch import arch_of, interpreting
from sglang_specverify.kernels.sparse_mla import quantize
from sglang_specverify.kernels.sparse_mla.conversions import conversions, parse_ptxas_version
from sglang_specverify.kernels.sparse_mla.formats import FORMATS, ROW_LAYOUTS
from sglang_specverify.kernels.sparse_mla.rounding import fp4_as_e4m3
from tests.kernels import sparse_mla_values as values


def inputs() -> torch.Tensor:
    """FP32 [n, 512]: every tie between codes and scales with the numbers beside it, random bits, NaN and infinities."""
    random = [values.any_bits(seed, 64, finite=bool(seed % 2)) for seed in range(4)]
    fp4 = [values.fp4_codes(), values.fp4_scales(), values.broken(16)]
    fp8 = [values.mxfp8_scales(), values.e4m3_codes(), values.e4m3_codes(-7), values.broken(32)]
    return torch.cat([*fp4, *fp8, *random])


def quantised(device: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each comparison's name, the bytes of the kernel and those of the plain path on the CPU."""
    rows = inputs()
    for name in FORMATS:
        for layout in ROW_LAYOUTS:
            for dtype in (torch.float32, torch.bfloat16):
                x = rows.to(dtype)
                got = quantize.deepseek_v41_quantize_cache(x.to(device), name, 61, layout=layout).cpu()
                with mock.patch.object(quantize, "uses_triton", lambda _: False):
                    want = quantize.deepseek_v41_quantize_cache(x, name, 61, layout=layout)
                yield f"{name} {layout} {str(dtype).removeprefix('torch.')}", got, want


def converted(device: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The same for main rows in E4M3, every code with every finite scale, in each way that is here."""
    from tests.interpreter.fp4_conversion import converting

    arch, ptxas = arch_of(torch.device(device)), (0, 0)
    if arch.startswith("sm_"):
        from triton.backends.nvidia.compiler import get_ptxas_version

        ptxas = parse_ptxas_version(get_ptxas_version(int(arch[3:])))
    codes = torch.arange(16, dtype=torch.uint8, device=device).repeat_interleave(256)
    scales = torch.arange(256, dtype=torch.uint8, device=device).repeat(16)
    finite = fp4_as_e4m3() & 0x7F != 0x7F
    for how in conversions(arch, ptxas):
        out = torch.full_like(codes, 0xA5)
        converting(codes, scales, out, how).run()
        yield f"fp4 to e4m3, {how}", out.cpu().view(16, 256)[finite], fp4_as_e4m3()[finite]


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        if not interpreting():
            print("no GPU; TRITON_INTERPRET=1 runs the kernels in Triton's interpreter")
            return 2
        from tests.interpreter.environment import prepare

        prepare()
    digest, failed = hashlib.sha256(), False
    for comparisons in (quantised(device), converted(device)):
        for name, got, want in comparisons:
            differ = int((got != want).sum())
            failed |= differ > 0
            if name.startswith(tuple(FORMATS)):
                digest.update(got.numpy().tobytes())
            print(f"{name:44} {got.numel():8} bytes  {'ok' if differ == 0 else f'{differ} DIFFER'}", flush=True)
    given = hashlib.sha256(inputs().view(torch.uint8).numpy().tobytes())
    print(f"{arch_of(torch.device(device))}: SHA-256 of the rows {given.hexdigest()}, of all caches {digest.hexdigest()}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
