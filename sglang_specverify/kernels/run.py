"""From a checked call to the implementation that serves it: facts, choice, launch."""

from __future__ import annotations

import torch

from sglang_specverify.errors import ArgumentError
from sglang_specverify.hardware import detect
from sglang_specverify.kernels.arguments import DraftArguments, Problem, VerifyArguments
from sglang_specverify.kernels.combine_parts import combinations
from sglang_specverify.kernels.fused import check_plan, fused_launch, packed_rows, refusal, split_of, tree_of
from sglang_specverify.kernels.launch import Launch, LaunchConfig, arch_of, uses_triton
from sglang_specverify.kernels.plan import MAX_CTAS_PER_SM, Masks, Plan, Shape, plan_launch, with_buffer
from sglang_specverify.kernels.reference import Result, run_draft_decode, run_verify
from sglang_specverify.kernels.specialized import ARCH, specialized_launch
from sglang_specverify.kernels.specialized import refusal as specialized_refusal
from sglang_specverify.kernels.tables import TableFacts, lookup
from sglang_specverify.kernels.variants import (
    DIVIDING,
    FEW_ROWS,
    LONG_PREFIX,
    SPECIALIZED,
    Choice,
    VariantFacts,
    choose_variant,
)

#: Programs that Triton's interpreter plans for: few enough to be quick, enough that prefixes are divided.
_INTERPRETED_PROGRAMS = 8


def programs_of(device: torch.device, config: LaunchConfig) -> int:
    """Programs that the device runs at once."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return detect().multiprocessors * min(config.ctas_per_sm, MAX_CTAS_PER_SM)


def table_facts(
    problem: Problem, cache_dtype: torch.dtype, q_dtype: torch.dtype, *, split: bool, deterministic: bool = False
) -> TableFacts:
    """What the table of launch configurations may depend on."""
    return TableFacts(
        rows=packed_rows(problem),
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        cache_bits=cache_dtype.itemsize * 8,
        q_bits=q_dtype.itemsize * 8,
        split=split,
        page_size=problem.page_size,
        kind=problem.kind,
        total_rows=0 if deterministic else packed_rows(problem) * problem.kv_heads * problem.batch,
    )


def config_of(
    kernel: str,
    arch: str,
    problem: Problem,
    cache_dtype: torch.dtype,
    q_dtype: torch.dtype,
    *,
    split: bool = False,
    deterministic: bool = False,
) -> LaunchConfig:
    """How the table, or its rule, launches `kernel` for a call."""
    facts = table_facts(problem, cache_dtype, q_dtype, split=split, deterministic=deterministic)
    return lookup(arch, kernel, facts)[0]


def is_uneven(problem: Problem, config: LaunchConfig, longest: int) -> bool:
    """Whether lengths up to `longest` may differ much, and dividing them costs little where they do not.

    The latter is so where a second launch combines the parts of few rows with head dim 128: `variants.divides`.
    """
    measured = config.combine == "launch" and problem.head_dim == problem.v_head_dim == 128 and packed_rows(problem) <= FEW_ROWS
    return measured and problem.window < 0 and longest >= LONG_PREFIX


def run(a: VerifyArguments | DraftArguments, problem: Problem, variant: str, plan: object, workspace: object) -> Result:
    """Serve a checked call.

    Raises:
        ArgumentError: a plan or a workspace that does not fit the call.
        SpecverifyError: no implementation serves it.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise ArgumentError("plan", type(plan).__name__, "what plan_verify_attention returned, or None")
    if workspace is not None and not isinstance(workspace, torch.Tensor):
        raise ArgumentError("workspace", type(workspace).__name__, "a uint8 tensor, or None")
    choice = choose(a, problem, variant, plan)
    if choice.name == "reference":
        return run_draft_decode(a, problem) if isinstance(a, DraftArguments) else run_verify(a, problem)
    return _run_triton(a, problem, choice.name, plan, workspace)


def choose(a: VerifyArguments | DraftArguments, problem: Problem, variant: str, plan: Plan | None = None) -> Choice:
    """The implementation for a checked call, with the reason; looks at no value of a tensor."""
    device = problem.device
    if not uses_triton(device):
        return choose_variant(variant, VariantFacts(device=device.type))
    arch = arch_of(device)
    types = a.k_cache.dtype, a.q.dtype
    config = config_of("fused", arch, problem, *types, split=False, deterministic=a.deterministic)
    longest = a.table.shape[1] * problem.page_size if problem.window < 0 else problem.window
    uneven = False
    if plan is None:  # a plan has decided
        dividing = config_of("fused", arch, problem, *types, split=True, deterministic=a.deterministic)
        uneven = is_uneven(problem, dividing, longest)
    facts = VariantFacts(
        device=device.type,
        interpreting=device.type == "cpu",
        capturing=device.type == "cuda" and torch.cuda.is_current_stream_capturing(),
        refusal=refusal(a, problem, arch),
        specialized=specialized_refusal(a, problem, arch),
        rows=packed_rows(problem),
        programs=-(-packed_rows(problem) // config.block_m) * problem.kv_heads * problem.batch,
        fill=programs_of(device, config),
        longest=longest,
        uneven=uneven,
        divided=None if plan is None else plan.divides,
        divided_for="fused" if plan is None else plan.kernel,
        deterministic=a.deterministic,
    )
    return choose_variant(variant, facts)


def _run_triton(
    a: VerifyArguments | DraftArguments, problem: Problem, variant: str, plan: Plan | None, workspace: torch.Tensor | None
) -> Result:
    out, lse = _outputs(a, problem)
    if problem.batch > 0:
        for launch in launches(a, problem, out, lse, arch_of(problem.device), variant, plan, workspace):
            launch.run()
    if not a.return_lse:
        return out
    assert lse is not None
    return out, lse


def launches(
    a: VerifyArguments | DraftArguments,
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    arch: str,
    variant: str,
    plan: Plan | None = None,
    workspace: torch.Tensor | None = None,
) -> list[Launch]:
    """The launch of a checked call; before it that of a plan where one is needed and none came, behind it one that combines."""
    divide, kernel = variant in DIVIDING, "specialized" if variant in SPECIALIZED else "fused"
    types = a.k_cache.dtype, a.q.dtype
    config = config_of(kernel, arch, problem, *types, split=divide, deterministic=a.deterministic)
    before: list[Launch] = []
    if plan is not None:
        check_plan(plan, a, problem, deterministic=a.deterministic)
        if divide or kernel == "fused":
            config = plan.shape.config
    else:
        plan, before = own_plan(a, problem, config, divide=divide, kernel=kernel)
    split = None
    if divide:
        assert plan is not None
        split = split_of(plan, workspace, problem.device)
    if kernel == "specialized":
        assert isinstance(a, VerifyArguments)
        arch, programs = ARCH, detect().multiprocessors
        first = specialized_launch(a, problem, out, lse, config, programs=programs, plan=plan, split=split)
    else:
        first = fused_launch(a, problem, out, lse, config, arch, plan=plan, split=split)
    return [*before, first, *combinations(a, problem, out, lse, arch, split)]


def own_plan(
    a: VerifyArguments | DraftArguments,
    problem: Problem,
    config: LaunchConfig,
    *,
    divide: bool,
    programs: int | None = None,
    kernel: str = "fused",
) -> tuple[Plan | None, list[Launch]]:
    """A plan for one call that came without, and the launch that fills it; None and no launch where the call needs none."""
    tree = tree_of(problem)
    if not divide and tree is None:
        return None, []
    shape = shape_of(problem, config, deterministic=a.deterministic, programs=programs)
    plan = Plan(a.prefix_lens, problem.batch, shape, problem.window, divide, tree, kernel=kernel)
    plan = with_buffer(plan, problem.device, None)
    return plan, [plan_launch(a.prefix_lens, a.row_ids, plan, masks_of(a, problem))]


def masks_of(a: VerifyArguments | DraftArguments, problem: Problem) -> Masks | None:
    if isinstance(a, DraftArguments) or a.mask is None:
        return None
    return Masks(a.mask, problem.kind == "full_mask", a.mask_offsets, a.q_offsets, problem.queries or 1)


def shape_of(problem: Problem, config: LaunchConfig, *, deterministic: bool, programs: int | None = None) -> Shape:
    return Shape(
        rows=packed_rows(problem),
        kv_heads=problem.kv_heads,
        v_head_dim=problem.v_head_dim,
        config=config,
        programs=programs or programs_of(problem.device, config),
        deterministic=deterministic,
    )


def _outputs(a: VerifyArguments | DraftArguments, problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The caller's outputs, or new ones whose padding rows say "no key": 0 and -inf."""
    out, lse = a.out, a.lse
    # The kernel writes every real row, so only padding is worth a launch to clear.
    covered = not problem.ragged and problem.queries is not None and problem.batch * problem.queries == problem.rows
    if out is None:
        shape = (problem.rows, problem.q_heads, problem.v_head_dim)
        out = a.q.new_empty(shape) if covered else a.q.new_zeros(shape)
    if lse is None and a.return_lse:
        lse = torch.full((problem.rows, problem.q_heads), -torch.inf, dtype=torch.float32, device=problem.device)
    return out, lse
