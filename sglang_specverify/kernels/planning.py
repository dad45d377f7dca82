"""The public side of plans: make one, and say how much scratch it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.hardware import detect
from sglang_specverify.kernels import checks, specialized
from sglang_specverify.kernels.arguments import Problem, check_mask, check_offsets, kind_of
from sglang_specverify.kernels.fused import QUERIES, call_of, packed_rows, tree_of
from sglang_specverify.kernels.launch import LaunchConfig, arch_of, uses_triton
from sglang_specverify.kernels.plan import MAX_CTAS_PER_SM, Masks, Plan, padded, plan_launch, with_buffer
from sglang_specverify.kernels.run import config_of, is_uneven, programs_of, shape_of
from sglang_specverify.kernels.variants import divides

#: The largest row tile of any launch configuration.
_MAX_BLOCK_M = 128


@dataclass(frozen=True)
class Layers:
    """What `plan_verify_attention` and `prepare_step` take beside the step's lengths and tables; see the former."""

    num_draft_tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None
    dtype: torch.dtype
    cache_dtype: torch.dtype | None
    page_size: int
    window: int
    branches: bool
    q_offsets: torch.Tensor | None
    num_rows: int | None
    mask: torch.Tensor | None
    mask_layout: str
    mask_offsets: torch.Tensor | None
    deterministic: bool
    divide: bool | None
    programs: int | None
    config: LaunchConfig | None
    kernel: str
    out: torch.Tensor | None
    longest: int = 0


def plan_verify_attention(
    prefix_lens: torch.Tensor,
    row_ids: torch.Tensor,
    *,
    num_draft_tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    page_size: int = 1,
    window: int = -1,
    branches: bool = False,
    q_offsets: torch.Tensor | None = None,
    num_rows: int | None = None,
    mask: torch.Tensor | None = None,
    mask_layout: str = "qlen_only",
    mask_offsets: torch.Tensor | None = None,
    deterministic: bool = False,
    divide: bool | None = None,
    programs: int | None = None,
    config: LaunchConfig | None = None,
    kernel: str = "fused",
    out: torch.Tensor | None = None,
    longest: int = 0,
) -> Plan:
    """Make a step's metadata on the device, by one launch: the division of the prefixes and the packed tree masks.

    All layers of the step whose shapes, window and mask are these share it. It reads no length on the host, so it can be
    captured into a graph; a replay makes it anew from the lengths and masks that its tensors hold then.

    Args:
        prefix_lens: int32 or int64 [bs], L.
        row_ids: int32 [bs], rows of the table that the calls will pass.
        num_draft_tokens: W, or topk with `branches`; beside `q_offsets` the most that a request may have.
        q_heads, kv_heads, head_dim, v_head_dim: of the layers; v_head_dim is head_dim where None.
        dtype, cache_dtype: of Q and of the cache; the cache's is `dtype` where None.
        page_size, window: as in `verify_attention`.
        branches: the plan is for `draft_decode_attention`.
        q_offsets: int32 [bs + 1], for ragged rows; `num_rows` then says how many rows Q has, as many as it ends at or more.
        mask, mask_layout, mask_offsets: as in `verify_attention`. A call with this plan takes its mask from here.
        deterministic: divide by each request's own length only.
        divide: whether prefixes are divided; where None, if they would leave the device half empty, or fill it once and may
            differ much (`variants.divides`).
        programs: programs to fill; the multiprocessors times what one of them holds where None.
        config: how the kernel is launched; from the architecture's table where None.
        kernel: "fused", or "specialized" for layers that the kernel with specialised warps takes: whose programs are to be
            filled. Prefixes that are divided for one are read by that one alone.
        out: int32 buffer of at least `Plan.words` entries; a new one where None. Fixed addresses make it fit for graphs.
        longest: tokens that a row of the calls' table can hold, pages times their size; 0 where that is not known. Read where
            `divide` is None.

    Returns:
        the plan, over `out`.

    Raises:
        ArgumentError: an argument that does not fit, on a CPU also a value; nothing was launched.
        SpecverifyError: the tensors are where no kernel runs.
    """
    plan, masks = plan_of(prefix_lens, Layers(
        num_draft_tokens=num_draft_tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        dtype=dtype, cache_dtype=cache_dtype, page_size=page_size, window=window, branches=branches, q_offsets=q_offsets,
        num_rows=num_rows, mask=mask, mask_layout=mask_layout, mask_offsets=mask_offsets, deterministic=deterministic,
        divide=divide, programs=programs, config=config, kernel=kernel, out=out, longest=longest,
    ))  # fmt: skip
    checks.tensor("row_ids", row_ids, (plan.batch,), (torch.int32,), prefix_lens.device, unit_last=True)
    if checks.on_cpu(row_ids) and (r := checks.first_row(row_ids < 0)) is not None:
        raise ArgumentError("row_ids", f"{int(row_ids[r])} for request {r}", "a row of table: 0 or more")
    if plan.batch > 0:
        plan_launch(prefix_lens, row_ids, plan, masks).run()
    return plan


def plan_of(prefix_lens: torch.Tensor, a: Layers) -> tuple[Plan, Masks | None]:
    """A plan, not filled yet, and the masks that go into it. Raises what `plan_verify_attention` does."""
    checks.tensor("prefix_lens", prefix_lens, ("bs",), checks.INTS, unit_last=True)
    device, batch = prefix_lens.device, len(prefix_lens)
    for name in ("num_draft_tokens", "q_heads", "kv_heads", "head_dim", "page_size"):
        checks.integer(name, getattr(a, name), 1)
    for name in ("v_head_dim", "programs"):
        if getattr(a, name) is not None:
            checks.integer(name, getattr(a, name), 1)
    checks.integer("window", a.window, -1)
    checks.integer("longest", a.longest, 0)
    for name in ("branches", "deterministic"):
        checks.flag(name, getattr(a, name))
    if a.divide is not None:
        checks.flag("divide", a.divide)
    checks.dtype("dtype", a.dtype, QUERIES)
    if a.cache_dtype is not None:
        checks.dtype("cache_dtype", a.cache_dtype, (*QUERIES, *checks.FP8))
    if a.config is not None and not isinstance(a.config, LaunchConfig):
        raise ArgumentError("config", type(a.config).__name__, "a LaunchConfig, or None")
    if a.q_heads % a.kv_heads:
        raise ArgumentError("q_heads", f"{a.q_heads} for {a.kv_heads} KV heads", "a whole number of query heads per KV head")
    if a.branches and (a.mask is not None or a.q_offsets is not None):
        raise ArgumentError("branches", "True with a mask or q_offsets", "neither: draft decode has topk rows and no mask")
    counts = _check_rows(a, batch, device)
    problem = Problem(
        kind="branches" if a.branches else kind_of(a.mask, a.mask_layout),
        batch=batch, rows=batch * a.num_draft_tokens if a.num_rows is None else a.num_rows, queries=a.num_draft_tokens,
        ragged=a.q_offsets is not None, q_heads=a.q_heads, kv_heads=a.kv_heads, group=a.q_heads // a.kv_heads,
        head_dim=a.head_dim, v_head_dim=a.v_head_dim or a.head_dim, page_size=a.page_size, window=a.window, softcap=0.0,
        sm_scale=1.0, out_dtype=a.dtype, device=device,
    )  # fmt: skip
    check_mask(problem, a.mask, a.mask_offsets)
    if checks.on_cpu(prefix_lens):
        checks.length_values(prefix_lens)
        if a.mask is not None and a.mask_offsets is not None:
            checks.mask_values(a.mask, a.mask_offsets, prefix_lens, a.num_draft_tokens if counts is None else counts)
    if not uses_triton(device):
        raise SpecverifyError(
            f"plans are for Triton kernels, and none run on {device.type} here",
            "use CUDA tensors, or set TRITON_INTERPRET=1 before triton is imported",
        )
    cache_dtype, arch = a.dtype if a.cache_dtype is None else a.cache_dtype, arch_of(device)
    _check_kernel(a, problem, arch)
    whole, dividing, divide = division(problem, a, cache_dtype, arch, lambda config: programs_of(device, config))
    config = dividing if divide else whole
    call = call_of(problem, a.dtype, cache_dtype)
    shape = shape_of(problem, config, deterministic=a.deterministic, programs=a.programs)
    plan = Plan(prefix_lens, batch, shape, a.window, divide, tree_of(problem), call, whole, a.kernel)
    masks = None
    if a.mask is not None:
        masks = Masks(a.mask, a.mask_layout == "full_mask", a.mask_offsets, a.q_offsets, a.num_draft_tokens)
    return with_buffer(plan, device, a.out), masks


def division(
    problem: Problem, a: Layers, cache_dtype: torch.dtype, arch: str, programs_at_once: Callable[[LaunchConfig], int]
) -> tuple[LaunchConfig, LaunchConfig, bool]:
    """How layers are launched undivided and divided, and which of both, for a device that runs so many programs of a launch."""
    types = cache_dtype, a.dtype
    whole = a.config or config_of("fused", arch, problem, *types, deterministic=a.deterministic)
    if a.kernel == "specialized":
        filling = dividing = a.config or config_of("specialized", specialized.ARCH, problem, *types, split=True)
        uneven = False
    else:
        dividing = a.config or config_of("fused", arch, problem, *types, split=True, deterministic=a.deterministic)
        filling, uneven = whole, is_uneven(problem, dividing, a.longest)
    if a.divide is not None:
        return whole, dividing, a.divide
    tiles = -(-packed_rows(problem) // filling.block_m) * problem.kv_heads * problem.batch
    return whole, dividing, a.deterministic or divides(tiles, programs_at_once(filling), uneven=uneven)


def _check_rows(a: Layers, batch: int, device: torch.device) -> torch.Tensor | None:
    """Rows of each request where they differ, int64 [bs], on a CPU. The buffer holds the bits of `num_rows` rows and no more."""
    if a.num_rows is not None:
        checks.integer("num_rows", a.num_rows, 0)
    if a.q_offsets is None:
        need = batch * a.num_draft_tokens
        if a.num_rows is not None and a.num_rows < need:
            raise ArgumentError("num_rows", a.num_rows, f"bs*W = {need} or more, or None")
        return None
    counts = check_offsets(a.q_offsets, batch, a.num_draft_tokens, device)
    if a.num_rows is None:
        raise ArgumentError("num_rows", "None with q_offsets", "the rows of q")
    if counts is not None and a.num_rows < int(a.q_offsets[-1]):
        raise ArgumentError("num_rows", a.num_rows, f"{int(a.q_offsets[-1])} or more: q_offsets ends there")
    return counts


def _check_kernel(a: Layers, problem: Problem, arch: str) -> None:
    """Raises `ArgumentError` for a kernel that there is not, or that takes no such layers."""
    if a.kernel == "fused":
        return
    if a.kernel != "specialized":
        raise ArgumentError("kernel", repr(a.kernel), "fused, specialized")
    # On a CPU its emulator serves, which is no less able.
    refusal = specialized.refusal_of_layers(
        problem, a.dtype, a.cache_dtype or a.dtype, specialized.ARCH if arch == "none" else arch
    )
    if refusal is None and a.deterministic:
        refusal = "a deterministic division is the fused kernel's"
    if refusal is not None:
        raise ArgumentError("kernel", f"specialized, and {refusal}", "fused for these layers")


def verify_attention_workspace_size(
    batch: int,
    *,
    num_draft_tokens: int,
    q_heads: int,
    kv_heads: int,
    v_head_dim: int,
    deterministic: bool = False,
    multiprocessors: int | None = None,
) -> int:
    """Bytes of scratch that no call up to these sizes exceeds, on any table. Pure arithmetic, monotone in every argument.

    A plan that was asked for more `programs` than the device runs at once may need more: its `shape.workspace_bytes` says.

    Args:
        batch: requests.
        num_draft_tokens: W, or topk.
        q_heads, kv_heads, v_head_dim: of the layers.
        deterministic: for deterministic calls.
        multiprocessors: of the device; this machine's where None.

    The scratch holds the parts of divided prefixes: at most 2 (programs / tiles + 1) for each of `tiles` pairs of row tile and
    KV head, so 2 (programs + tiles) tiles of FP32 rows; deterministic, at most 512 rows for each KV head and request, and none
    where these have so many rows that nothing is divided.
    """
    for name, value in (("batch", batch), ("num_draft_tokens", num_draft_tokens), ("q_heads", q_heads),
                        ("kv_heads", kv_heads), ("v_head_dim", v_head_dim)):  # fmt: skip
        checks.integer(name, value, 0 if name == "batch" else 1)
    checks.flag("deterministic", deterministic)
    if multiprocessors is None:
        multiprocessors = max(1, detect().multiprocessors)
    checks.integer("multiprocessors", multiprocessors, 1)
    if q_heads % kv_heads:
        raise ArgumentError("q_heads", f"{q_heads} for {kv_heads} KV heads", "a whole number of query heads per KV head")
    rows = num_draft_tokens * (q_heads // kv_heads)
    row_bytes = (padded(v_head_dim) + 1) * 4
    if deterministic:
        return batch * kv_heads * 512 * row_bytes
    programs = MAX_CTAS_PER_SM * multiprocessors
    return 2 * (programs * _MAX_BLOCK_M + (rows + _MAX_BLOCK_M) * kv_heads) * row_bytes
