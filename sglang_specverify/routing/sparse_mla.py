"""Who serves sparse MLA in SGLang's dsv4 backend, and which rows its pool holds. Pure; reads no tensor.

Two decisions, each with its reason: for a call of `_flash_mla_with_kvcache`, and for a pool that is about to be made. The rows
are named as SGLang's `KVLayout` names their encodings: `v4` (584 bytes), `v41` (528), `v41_fp4` (288), `uniform_fp8` (512).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import Flags
from sglang_specverify.hardware import Hardware
from sglang_specverify.routing.base import Rejected
from sglang_specverify.routing.route import STOCK, Decision

SPARSE_MLA, FP4_POOL = "sparse_mla", "fp4_pool"

#: Bytes of a row, by the encoding's name.
ROW_BYTES = {"v4": 584, "v41": 528, "v41_fp4": 288, "uniform_fp8": 512}
HEADS = (8, 16, 32, 64, 128)
#: An E4M3 Q would have a scale, which the call has no place for.
DTYPES = ("bfloat16",)
HEAD_DIM = 512
#: Requests of one launch: the grid's last dimension.
MAX_ROWS = 65535
#: NVIDIA architectures that have the kernel's exact contract.
ARCHS = ("sm_90", "sm_100", "sm_103", "sm_107")
_V41 = ("v41", "v41_fp4")
#: Where SGLang's FlashMLA reads the rows of V4.1.
_STOCK_V41 = ("sm100", "sm103", "sm107")


@dataclass(frozen=True)
class SparseCall:
    """What is known of one call, or of all calls of one compress ratio before the first.

    Attributes:
        window, extra: encodings of the window's rows and of the selected ones; None for no second cache.
        heads: of Q as it is passed, padding included. queries: rows a request in Q, which SGLang keeps at 1.
        backend: `--dsv4-attn-backend`, resolved.
        seam: whether this SGLang's backend calls FlashMLA through `_flash_mla_with_kvcache`.
        unknown: what the call sets and nobody here knows.
    """

    window: str
    extra: str | None = None
    heads: int = 64
    queries: int = 1
    head_dim: int = HEAD_DIM
    dtype: str = "bfloat16"
    backend: str = "flashmla"
    seam: bool = True
    unknown: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PoolRequest:
    """What decides the rows of a pool.

    Attributes:
        layout: `SGLANG_DSV4_KV_LAYOUT` where it is set, else None. compressed: `SGLANG_DSV4_COMPRESSED_KV_LAYOUT`.
        backend: `--dsv4-attn-backend`, resolved. q8_prefill: whether FP8 sparse prefill is on.
        seam: see `SparseCall`.
    """

    layout: str | None = None
    compressed: str = "auto"
    backend: str = "flashmla"
    q8_prefill: bool = False
    seam: bool = True


def decide_sparse_mla(hardware: Hardware, call: SparseCall, flags: Flags) -> Decision:
    """The kernel `sparse_mla`, or SGLang's own with the reason."""
    left = _left(flags)
    refusal = left or _refusal(hardware, call, flags)
    if refusal is None:
        rows = "window rows of 528 bytes" + (" and selected rows of 288, read as they are stored" if call.extra else "")
        stock = Rejected(STOCK, "SGLang's FlashMLA, which SGLANG_SPECVERIFY_SPARSE_MLA=1 replaces where the kernel serves")
        return Decision(SPARSE_MLA, rows, (stock,), True)
    serves = "SGLang's own kernel serves" if stock_serves(hardware, call) else "no kernel of SGLang's serves this either"
    return Decision(STOCK, f"{refusal}: {serves}", (Rejected(SPARSE_MLA, refusal),), left is None)


def stock_serves(hardware: Hardware, call: SparseCall) -> bool:
    """Whether the call may be left to SGLang.

    Its FlashMLA reads the rows of V4.1 on SM100 and its successors alone; on SM90 it would take rows of 528 bytes for those of
    another model. What is no row of V4.1 it refuses by itself.
    """
    return call.window not in _V41 or call.backend != "flashmla" or hardware.family in _STOCK_V41


def decide_fp4_pool(hardware: Hardware, request: PoolRequest, flags: Flags) -> Decision:
    """Whether a pool gets the rows of V4.1 where SGLang would make those of V4.

    Raises:
        SpecverifyError: the pool is asked for and the kernel that reads it is not.
    """
    if not flags.fp4_pool or flags.disable:
        left = "SGLANG_SPECVERIFY_DISABLE=1" if flags.disable else "off by default: SGLANG_SPECVERIFY_FP4_POOL=1 asks for it"
        return Decision(STOCK, left, (Rejected(FP4_POOL, left),), False)
    if not flags.sparse_mla:
        raise SpecverifyError(
            "SGLANG_SPECVERIFY_FP4_POOL=1 without SGLANG_SPECVERIFY_SPARSE_MLA=1: nothing would read the pool on Hopper",
            "set both, or neither",
        )
    refusal = _pool_refusal(hardware, request)
    if refusal is not None:
        return Decision(STOCK, f"{refusal}: SGLang chooses the rows", (Rejected(FP4_POOL, refusal),), True)
    stock = Rejected(STOCK, "SGLang would make rows of 584 bytes, which round the model's FP4 latents once more")
    return Decision(FP4_POOL, "window rows of 528 bytes, selected rows of 288", (stock,), True)


def pool_rows(hardware: Hardware, request: PoolRequest, decision: Decision, ratio: int) -> tuple[str, str | None]:
    """Encodings of the window's rows and of those of one compress ratio, as the pool will hold them; ratio 0 has no second cache.

    Mirrors SGLang's `select_dsv4_kv_layout` and `resolve_compressed_kv_layout`.
    """
    if request.backend == "trtllm":
        return "uniform_fp8", "uniform_fp8" if ratio else None
    newer = hardware.family in _STOCK_V41 and (request.backend == "flashmla_mega" or (request.layout or "v4") != "v4")
    if not (decision.served or newer):
        return "v4", "v4" if ratio else None
    fp4 = request.compressed == "fp4" or (request.compressed == "auto" and ratio in (1, 2))
    return "v41", ("v41_fp4" if fp4 else "v41") if ratio else None


def _left(flags: Flags) -> str | None:
    if flags.disable:
        return "SGLANG_SPECVERIFY_DISABLE=1"
    return None if flags.sparse_mla else "off by default: SGLANG_SPECVERIFY_SPARSE_MLA=1 asks for it"


def _refusal(hardware: Hardware, call: SparseCall, flags: Flags) -> str | None:
    """Why the kernel does not take `call`, or None. What nobody knows comes before what the kernel does not."""
    interpreted = not hardware.has_gpu and flags.kernels == "triton"
    if hardware.arch not in ARCHS and not interpreted:
        amd = hardware.vendor == "amd"
        return "on AMD SGLang runs another dsv4 backend" if amd else f"{SPARSE_MLA} does not run on {hardware.display}"
    if call.backend != "flashmla":
        return f"--dsv4-attn-backend {call.backend} has a path of its own past the seam; --dsv4-attn-backend flashmla has it"
    if not call.seam:
        return "this SGLang's dsv4 backend has no seam for the call of FlashMLA; 0.5.23 has one"
    if call.unknown:
        return f"{SPARSE_MLA} does not know what the call passes: {', '.join(sorted(call.unknown))}"
    if call.window != "v41":
        return f"{_rows(call.window)} in the window's cache{_way_out(hardware, call.window)}"
    if call.extra not in (None, "v41_fp4"):
        return f"{_rows(call.extra)} among the selected, of which {SPARSE_MLA} reads FP4 alone"
    if call.head_dim != HEAD_DIM:
        return f"head dim {call.head_dim}, not {HEAD_DIM}"
    if call.queries != 1:
        return f"{call.queries} rows a request where SGLang passes 1"
    if call.heads not in HEADS:
        return f"{call.heads} heads, not {', '.join(map(str, HEADS))}"
    if call.dtype not in DTYPES:
        return f"Q in {call.dtype}, not {' or '.join(DTYPES)}"
    return None


def _rows(name: str | None) -> str:
    size = ROW_BYTES.get(name or "")
    return f"rows of {size} bytes ({name})" if size else f"rows of a kind that nobody here knows ({name})"


def _way_out(hardware: Hardware, window: str) -> str:
    if window != "v4":
        return ""
    hopper = hardware.family == "sm90"
    return f" ({'SGLANG_SPECVERIFY_FP4_POOL=1' if hopper else 'SGLANG_DSV4_KV_LAYOUT=v41'} makes those of V4.1)"


def _pool_refusal(hardware: Hardware, request: PoolRequest) -> str | None:
    if hardware.family in _STOCK_V41:
        return f"SGLang makes these rows itself on {hardware.display} (SGLANG_DSV4_KV_LAYOUT=v41)"
    if hardware.family != "sm90":
        return f"{FP4_POOL} is for SM90, not for {hardware.display}"
    if request.backend != "flashmla":
        return f"--dsv4-attn-backend {request.backend} has pools of its own"
    if not request.seam:
        return "this SGLang's dsv4 backend has no seam for a kernel that reads it; 0.5.23 has one"
    if request.layout not in (None, "auto", "v41", "v41_new"):
        return f"SGLANG_DSV4_KV_LAYOUT={request.layout} asks for other rows"
    if request.compressed not in ("auto", "fp4"):
        return f"SGLANG_DSV4_COMPRESSED_KV_LAYOUT={request.compressed}: {SPARSE_MLA} reads FP4 alone"
    if request.q8_prefill:
        return "FP8 sparse prefill reads rows of 584 bytes alone (--dsv4-prefill-backend auto, SGLANG_DSV4_Q8KV8_PREFILL=0)"
    return None
