"""Which implementation of an operation serves a call, as a pure function that gives its reason."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_specverify.errors import ArgumentError, SpecverifyError

#: Every implementation in this version, by the name that `variant` takes.
#: reference: FP64, plain PyTorch. fused: one kernel over prefix and drafts. fused_split: the same, with the prefix divided
#: over programs by a plan. specialized: one kernel over both for Hopper and many query rows, and specialized_split that one
#: with the prefix divided.
VARIANTS = ("reference", "fused", "fused_split", "specialized", "specialized_split")

#: Those that divide a prefix, and those of the kernel with specialised warps.
DIVIDING, SPECIALIZED = ("fused_split", "specialized_split"), ("specialized", "specialized_split")

#: Up to this many keys no prefix is worth dividing: two parts of the least length of `plan.MIN_CHUNKS` for a kernel whose last
#: program combines. A second launch makes shorter parts of longer prefixes; it loses more often than it gains below this.
SHORT_PREFIX = 512

#: A table row that holds so many keys or more may be one of requests of very different lengths.
LONG_PREFIX = 4096

#: Up to so many packed rows half of a specialised tile would be padding, and the fused kernel is as fast.
FEW_ROWS = 64


@dataclass(frozen=True)
class VariantFacts:
    """What the choice depends on; nothing in it is read from the device.

    Attributes:
        device: type of q's device: "cpu", "cuda", "meta".
        interpreting: Triton's interpreter is on.
        capturing: a graph is being captured on this thread's stream.
        refusal: why the fused kernel cannot take the call, or None.
        specialized: why the specialised kernel cannot take it, or None.
        rows: packed query rows of a KV head in one request.
        programs: programs of the fused kernel without a split: row tiles times KV heads times requests.
        fill: programs that the device runs at once.
        longest: keys that a table row can hold, an upper bound of every L.
        uneven: lengths may differ much, and dividing costs little where they do not.
        divided: whether the caller's plan divides prefixes; None where no plan came.
        divided_for: the kernel that the caller's plan divides for, "fused" or "specialized".
        deterministic: rows must not depend on the rest of the batch.
    """

    device: str
    interpreting: bool = False
    capturing: bool = False
    refusal: str | None = None
    specialized: str | None = "it is written for other hardware"
    rows: int = 1
    programs: int = 1
    fill: int = 1
    longest: int = 1 << 30
    uneven: bool = False
    divided: bool | None = None
    divided_for: str = "fused"
    deterministic: bool = False


@dataclass(frozen=True)
class Choice:
    """The implementation that serves, and why."""

    name: str
    reason: str


def divides(programs: int, fill: int, *, uneven: bool) -> bool:
    """Whether a plan divides prefixes for the programs of a batch: if they leave half of the device empty.

    `uneven` batches are divided up to a full device: undivided they take as long as their longest request alone. Of 32 requests
    with W 8 and 128 to 32768 tokens that is three times as long as divided; where all have the same length, of 2048 tokens or
    more, dividing costs trees 8 % at most, and with 128 to 384 tokens up to a half where these differ. That is of 32 requests,
    8 KV heads and trees (`benchmarks/results/verify-attention-h200.json`); chains and draft steps of many requests were timed
    before a second launch combined, at equal lengths alone.
    """
    return programs <= (fill if uneven else fill // 2)


def check_variant(variant: str) -> None:
    """Raises `ArgumentError` for a name that is neither "auto" nor one of `VARIANTS`."""
    if variant not in ("auto", *VARIANTS):
        raise ArgumentError("variant", repr(variant), ", ".join(("auto", *VARIANTS)))


def choose_variant(variant: str, facts: VariantFacts) -> Choice:
    """The implementation that serves a call.

    Raises:
        ArgumentError: no such variant.
        SpecverifyError: the one named cannot serve, or "auto" finds none.
    """
    check_variant(variant)
    if variant == "auto":
        return _choose(facts)
    refusal = refusal_of(variant, facts)
    if refusal is not None:
        raise SpecverifyError(f"variant {variant} cannot serve this call: {refusal}", "name another variant, or pass auto")
    return Choice(variant, "asked for by name")


def refusal_of(variant: str, facts: VariantFacts) -> str | None:
    """Why `variant` cannot serve, or None."""
    if variant == "reference":
        if facts.device == "meta":
            return "it needs values, and meta tensors hold none"
        if facts.capturing:
            return "it reads lengths on the host and cannot be captured into a graph"
        return None
    if facts.device == "cpu" and not facts.interpreting:
        return "its tensors lie on the CPU and Triton's interpreter is off: set TRITON_INTERPRET=1 before triton is imported"
    if facts.device not in ("cpu", "cuda"):
        return f"it runs on cuda, and on cpu in Triton's interpreter, not on {facts.device}"
    if facts.divided is not None and facts.divided != (variant in DIVIDING):
        return f"a plan came that {'divides' if facts.divided else 'does not divide'} prefixes"
    if facts.divided and (facts.divided_for == "specialized") != (variant in SPECIALIZED):
        return f"a plan came that divides prefixes for the {facts.divided_for} kernel"
    if variant == "specialized_split" and facts.deterministic:
        return "a deterministic division is the fused kernel's"
    return facts.specialized if variant in SPECIALIZED else facts.refusal


def _choose(facts: VariantFacts) -> Choice:
    divided = "specialized_split" if facts.divided and facts.divided_for == "specialized" else "fused_split"
    refusal = refusal_of("fused" if facts.divided is False else divided, facts)
    if refusal is not None:
        if facts.device == "cpu":
            return Choice("reference", f"on a CPU: {refusal}")
        # On a GPU nobody is served by the slow reference unasked.
        raise SpecverifyError(f"no kernel serves this call: {refusal}", 'change what it names, or pass variant="reference"')
    if facts.divided:
        return Choice(divided, "the plan divides prefixes")
    if facts.divided is not None:
        return _either(facts, "", "the plan divides nothing")
    if facts.deterministic:
        return Choice("fused_split", "deterministic: the split follows each request's own length")
    if facts.longest <= SHORT_PREFIX:
        return _either(facts, "", f"a table row holds {facts.longest} keys at most, too few to divide")
    if not divides(facts.programs, facts.fill, uneven=facts.uneven):
        return _either(facts, "", f"{facts.programs} programs for {facts.fill} at once: the device is filled without a split")
    return _either(facts, "_split", f"{facts.programs} programs for {facts.fill} at once: the prefix is divided")


def _either(facts: VariantFacts, suffix: str, reason: str) -> Choice:
    """One of the two kernels, by the rows that a tile of theirs would have."""
    if facts.rows <= FEW_ROWS:
        return Choice("fused" + suffix, f"{reason}; {facts.rows} rows of a KV head fill no specialised tile")
    if facts.specialized is not None:
        return Choice("fused" + suffix, f"{reason}; the specialised kernel does not take it: {facts.specialized}")
    return Choice("specialized" + suffix, f"{reason}; {facts.rows} rows of a KV head fill its tiles")
