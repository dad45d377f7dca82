"""Checks of a sparse MLA decode before its launch: every argument by name, what came, what is allowed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.kernels import checks
from sglang_specverify.kernels.sparse_mla.formats import DIM, Format, check_cache, check_layout, format_of, row_addressing

HEADS = (8, 16, 32, 64, 128)
MAX_QUERIES = 8
SWA_FORMATS, MAIN_FORMATS = ("swa_mxfp8", "swa_fp8"), ("main_kv_fp4",)
#: Contracts, and the architectures that have each; "none" is Triton's interpreter.
CONTRACTS: dict[str, tuple[str, ...]] = {
    "exact": ("sm_90", "sm_100", "sm_103", "sm_107", "gfx950", "none"),
    "e4m3": ("sm_100", "sm_103", "sm_107", "none"),
}
#: Of the e4m3 contract: formats of the window's rows, and the fewest entries of a tile: an instruction adds up 32 products.
E4M3_SWA_FORMATS, E4M3_KEYS = ("swa_fp8",), 32
#: Bytes to which caches, q and out are aligned: one vector load or store.
ALIGNMENT = 16


@dataclass(frozen=True)
class Pool:
    """A cache with the lists of what is read from it.

    Attributes:
        cache: uint8 [pages, page_bytes], a stride from page to page.
        indices: int32 [B, Sq, n], or [B, 1, n] for one list that all rows of a request read.
        lens, starts: int32 [B, Sq] or None; the entries of a list that a row reads are starts to starts + lens.
    """

    cache: torch.Tensor
    indices: torch.Tensor
    format: Format
    page_rows: int
    layout: str
    lens: torch.Tensor | None
    starts: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        return self.cache.shape[0] * self.page_rows

    @property
    def shared(self) -> bool:
        """Whether there is one list for all rows of a request."""
        return self.indices.shape[1] == 1

    @property
    def addressing(self) -> tuple[int, int, int]:
        """Bytes from row to row, to the first scale of a page, from scale to scale."""
        _, row, base, scale_row = row_addressing(self.format, self.page_rows, self.layout)
        return row, base, scale_row


@dataclass(frozen=True)
class DecodeArguments:
    """A checked call. `main` is None where only the window is read; `contract` is one of `CONTRACTS`."""

    q: torch.Tensor
    swa: Pool
    main: Pool | None
    sink: torch.Tensor | None
    bmm1_scale: float
    bmm2_scale: float
    contract: str = "exact"

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def queries(self) -> int:
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def packed(self) -> bool:
        """Whether rows of one request may share a tile: they read one list of the window."""
        return self.queries > 1 and self.swa.shared

    @property
    def topk(self) -> int:
        return 0 if self.main is None else self.main.indices.shape[2]


def check_contract(contract: object, arch: str, q: torch.Tensor) -> str:
    """`contract`, if `arch` has it, and it has q's type; the error lists those that it has."""
    served = [name for name, archs in CONTRACTS.items() if arch in archs]
    if contract not in served:
        there = ", ".join(map(repr, served)) or "none: this kernel is for " + ", ".join(CONTRACTS["exact"][:-1])
        raise ArgumentError("contract", f"{contract!r} on {arch}", there)
    if contract == "e4m3" and q.dtype != torch.float8_e4m3fn:
        allowed = "torch.float8_e4m3fn with its scale in bmm1_scale, or contract 'exact'"
        raise ArgumentError("q", f"{q.dtype} in the e4m3 contract", allowed)
    return str(contract)


def check_q(q: object) -> torch.Tensor:
    q = checks.tensor("q", q, ("B", "Sq", "H", DIM), (torch.bfloat16, torch.float8_e4m3fn), unit_last=True)
    if not 1 <= q.shape[1] <= MAX_QUERIES:
        raise ArgumentError("q", f"Sq = {q.shape[1]} rows a request", f"1 to {MAX_QUERIES}")
    if q.shape[2] not in HEADS:
        raise ArgumentError("q", f"H = {q.shape[2]} heads", ", ".join(map(str, HEADS)))
    # The grid's last dimension.
    if q.shape[0] > 65535:
        raise ArgumentError("q", f"B = {q.shape[0]} requests", "65535 or fewer")
    _aligned("q", q)
    return q


def check_pool(
    name: str, q: torch.Tensor, cache: object, indices: object, format: object, page_rows: object, layout: object, lens: object,
    starts: object = None, contract: str = "exact",
) -> Pool:  # fmt: skip
    """One cache and what is read from it; `name` is "swa" or "main"."""
    kind = format_of(f"{name}_format", format)
    allowed = SWA_FORMATS if name == "swa" else MAIN_FORMATS
    if kind.name not in allowed:
        raise ArgumentError(f"{name}_format", repr(kind.name), " or ".join(map(repr, allowed)))
    if name == "swa" and contract == "e4m3" and kind.name not in E4M3_SWA_FORMATS:
        # A value times its group's power of two is no E4M3 number in general. Block-scaled products would take the scales for the
        # scores, but not for the output: there they change from column to column, and from key to key of one sum.
        there = " or ".join(map(repr, E4M3_SWA_FORMATS))
        raise ArgumentError("swa_format", f"{kind.name!r} in the e4m3 contract", f"{there}, or contract 'exact'")
    rows = checks.integer(f"{name}_page_rows", page_rows, 1)
    # Offsets within a page are 32 bits wide; those of pages are 64.
    if rows * kind.row_bytes >= 2**31:
        raise ArgumentError(f"{name}_page_rows", f"{rows} rows of {kind.row_bytes} bytes", "pages of less than 2^31 bytes")
    pool = check_cache(f"{name}_cache", cache, kind, rows, q.device)
    _aligned(f"{name}_cache", pool)
    if pool.shape[0] * rows > 2**31 - 1:
        raise ArgumentError(f"{name}_cache", f"{pool.shape[0]} pages of {rows} rows", "2^31 - 1 rows or fewer: slots are int32")
    listed = checks.tensor(f"{name}_indices", indices, (q.shape[0], "Sq or 1", "n"), (torch.int32,), q.device, unit_last=True)
    if listed.shape[1] not in (1, q.shape[1]):
        raise ArgumentError(f"{name}_indices", f"{listed.shape[1]} lists a request", f"Sq = {q.shape[1]}, or 1 for all rows")
    begins = _per_row(f"{name}_starts", starts, q)
    if begins is not None and not (listed.shape[1] == 1):
        raise ArgumentError(f"{name}_starts", "starts of lists that rows do not share", f"None, or {name}_indices [B, 1, n]")
    layout = check_layout(f"{name}_layout", layout)
    return Pool(pool, listed, kind, rows, layout, _per_row(f"{name}_lens", lens, q), begins)


def check_sink(sink: object, q: torch.Tensor) -> torch.Tensor | None:
    if sink is None:
        return None
    return checks.tensor("sink", sink, (q.shape[2],), checks.SINKS, q.device, unit_last=True)


def check_outputs(q: torch.Tensor, out: object, lse: object, reads: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's outputs, or new ones; no two of their elements may share memory, nor one of them with what is read."""
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    out = checks.tensor("out", out, tuple(q.shape), (torch.bfloat16,), q.device, unit_last=True)
    lse = checks.tensor("lse", lse, tuple(q.shape[:3]), (torch.float32,), q.device)
    _aligned("out", out)
    for name, value in (("out", out), ("lse", lse)):
        checks.output(name, value)
        for other, read in {**reads, **({"out": out} if name == "lse" else {})}.items():
            if overlap(value, read):
                raise ArgumentError(name, f"memory that it shares with {other}", "memory of its own")
    return out, lse


def check_workspace(workspace: object, needed: int, q: torch.Tensor, others: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The caller's workspace, or a new one; None where none is needed."""
    if workspace is not None:
        space = checks.tensor("workspace", workspace, ("bytes",), (torch.uint8,), q.device, unit_last=True)
        if space.numel() < needed:
            allowed = f"{needed} or more, as deepseek_v41_decode_workspace_size says"
            raise ArgumentError("workspace", f"{space.numel()} bytes", allowed)
        _aligned("workspace", space)
        for name, other in others.items():
            if overlap(space, other):
                raise ArgumentError("workspace", f"memory that it shares with {name}", "memory of its own")
        return space if needed else None
    return torch.empty(needed, dtype=torch.uint8, device=q.device) if needed else None


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the spans of memory from first to last element of two tensors meet."""
    if a.numel() == 0 or b.numel() == 0 or a.device.type == "meta":
        return False

    def span(t: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    return a_first < b_end and b_first < a_end


def _per_row(name: str, value: object, q: torch.Tensor) -> torch.Tensor | None:
    """int32 [B, Sq], from that or from [B] with one value for all rows of a request."""
    if value is None:
        return None
    one = isinstance(value, torch.Tensor) and value.dim() == 1
    given = checks.tensor(name, value, (q.shape[0],) if one else (q.shape[0], q.shape[1]), (torch.int32,), q.device)
    return given[:, None].expand(q.shape[0], q.shape[1]) if one else given


def _aligned(name: str, value: torch.Tensor) -> None:
    """Base and all strides but the last at `ALIGNMENT` bytes, so that rows are read and written in whole vectors."""
    if value.device.type != "meta" and value.data_ptr() % ALIGNMENT:
        raise ArgumentError(name, f"memory at {value.data_ptr():#x}", f"an address that {ALIGNMENT} divides")
    for size, stride in zip(value.shape[:-1], value.stride()[:-1], strict=True):
        if size > 1 and stride * value.element_size() % ALIGNMENT:
            came = f"strides {list(value.stride())} of {value.element_size()}-byte elements"
            raise ArgumentError(name, came, f"strides of multiples of {ALIGNMENT} bytes but for the last")
