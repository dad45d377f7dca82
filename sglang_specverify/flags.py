"""Every environment variable of the plugin: name, type, default, meaning. Nothing else reads one.

A value that does not parse, and a `SGLANG_SPECVERIFY_*` name that does not exist, are errors: a
misspelt opt-out that is silently ignored would serve what the user asked not to be served.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_specverify.errors import SpecverifyError

PREFIX = "SGLANG_SPECVERIFY_"

#: Built-in SGLang backends that the plugin has a subclass of.
BASES = ("fa3", "fa4", "triton", "aiter")


@dataclass(frozen=True)
class Flag:
    """One environment variable. `choices` is empty for a boolean."""

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        return self.name.removeprefix(PREFIX).lower()

    @property
    def type(self) -> str:
        return " | ".join(self.choices) if self.choices else "bool"


FLAGS = (
    Flag(f"{PREFIX}DISABLE", "0", "Switch the whole plugin off: the base that would have been chosen serves, stock."),
    Flag(f"{PREFIX}STRICT", "0", "A case the plugin does not serve is an error at start-up instead of a logged fallback."),
    Flag(
        f"{PREFIX}BASE",
        "auto",
        "The built-in backend underneath; auto chooses by hardware, head dim, cache type, page size and topk.",
        ("auto", *BASES),
    ),
    Flag(
        f"{PREFIX}KERNELS",
        "auto",
        "Without a GPU: the FP64 reference in PyTorch (auto means this) or Triton kernels in the interpreter.",
        ("auto", "reference", "triton"),
    ),
    Flag(f"{PREFIX}TREE", "1", "Serve target verify of trees (topk > 1); 0 leaves it to the base."),
    Flag(f"{PREFIX}CHAIN", "1", "Serve target verify of chains (topk = 1) and draft extend; 0 leaves them to the base."),
    Flag(f"{PREFIX}DRAFT_DECODE", "1", "Serve the steps of a multi-step draft; 0 leaves them to the base."),
    Flag(
        f"{PREFIX}TREE_KERNEL",
        "auto",
        "Trees over fa3 and fa4: prefix and tree in one kernel (fused), or FlashAttention's prefix pass and then the tree as one "
        "tile (tile) or each row's own ancestors, by a kernel of the plugin where it fits (gather) or by FlashAttention (flash); "
        "auto takes one of the first two by context, width and hardware.",
        ("auto", "fused", "tile", "gather", "flash"),
    ),
    Flag(
        f"{PREFIX}CHAIN_KERNEL",
        "auto",
        "Chains, the steps of their drafts and draft extend over fa3, fa4 and aiter: left to these (base), or served in one "
        "kernel (fused); auto leaves them but for what aiter cannot take, and for verify over FlashAttention with few requests.",
        ("auto", "fused", "base"),
    ),
    Flag(
        f"{PREFIX}AITER_VERIFY",
        "1",
        "Correct what SGLang hands to aiter's kernels for verify of chains and draft extend; 0 leaves both as SGLang has them.",
    ),
    Flag(f"{PREFIX}GFX942", "0", "Serve chains and draft extend on gfx942 too, as on gfx95x; 0 leaves them to the base there."),
    Flag(
        f"{PREFIX}MTP",
        "1",
        "Load the MTP part of a Qwen3.5 checkpoint of Quark's in the types that its files have; 0 leaves it to SGLang, which "
        "goes by the exclude list.",
    ),
    Flag(
        f"{PREFIX}SPARSE_MLA",
        "0",
        "Serve sparse MLA of DeepSeek-V4.1 in SGLang's dsv4 backend, where the pool holds its E4M3 and FP4 rows; needs no "
        "--attention-backend.",
    ),
    Flag(
        f"{PREFIX}FP4_POOL",
        "0",
        "On Hopper, where SGLang would make 584-byte rows, give DeepSeek-V4.1 its E4M3 and FP4 rows; needs SPARSE_MLA=1, since "
        "nothing else reads them there.",
    ),
)

#: SGLang's own switches. The plugin inherits their meaning and changes none.
UPSTREAM_SWITCHES = (
    Flag(
        "SGLANG_ENABLE_SPLITKV_VERIFY",
        "1",
        "SGLang's split-KV chain verify in its Triton backend (gfx95x); 0 also leaves chains over triton to SGLang.",
    ),
    Flag("SGLANG_USE_AITER_UNIFIED_ATTN", "0", "SGLang's unified attention in its aiter backend."),
    Flag("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "0", "SGLang prepares verify on a second stream; not for trees over fa3 or fa4."),
    Flag("SGLANG_AITER_UNIFIED_VERIFY", "1", "Target verify through aiter's unified attention, where that is on."),
    Flag(
        "SGLANG_DSV4_KV_LAYOUT",
        "v4",
        "Rows of the DeepSeek-V4 family's window cache: 584 bytes (v4), or those of V4.1, which SGLang makes on SM100 and SM103.",
        ("v4", "v41", "v41_new", "auto"),
    ),
    Flag(
        "SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
        "auto",
        "Selected rows beside a window of V4.1; auto means FP4 where the model's own latents are FP4.",
        ("auto", "fp8", "fp4"),
    ),
    Flag("SGLANG_MINICPM_FORCE_DENSE", "0", "MiniCPM's sparse layers as dense ones, which alone the plugin serves."),
    Flag("SGLANG_DSV4_Q8KV8_PREFILL", "0", "SGLang's FP8 sparse prefill on Hopper, which reads 584-byte rows alone."),
)


@dataclass(frozen=True)
class Flags:
    """The flags of one process, parsed. Field names are the variables' without the prefix."""

    disable: bool = False
    strict: bool = False
    base: str = "auto"
    kernels: str = "auto"
    tree: bool = True
    chain: bool = True
    draft_decode: bool = True
    tree_kernel: str = "auto"
    chain_kernel: str = "auto"
    aiter_verify: bool = True
    gfx942: bool = False
    mtp: bool = True
    sparse_mla: bool = False
    fp4_pool: bool = False


_BOOLS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def parse(flag: Flag, value: str) -> bool | str:
    """The value of `flag`, or a `SpecverifyError` that names the variable and what it takes."""
    text = value.strip().lower()
    if flag.choices:
        if text in flag.choices:
            return text
        raise SpecverifyError(
            f"{flag.name}={value!r} is not one of {', '.join(flag.choices)}",
            f"unset {flag.name}, or set it to one of these",
        )
    if text in _BOOLS:
        return _BOOLS[text]
    raise SpecverifyError(f"{flag.name}={value!r} is not a boolean", f"set {flag.name} to 0 or 1")


def switch(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """The value of one of SGLang's own switches; a value that is no boolean counts as SGLang reads it, as off."""
    flag = next(flag for flag in UPSTREAM_SWITCHES if flag.name == name)
    value = (os.environ if environ is None else environ).get(name, flag.default)
    return _BOOLS.get(value.strip().lower(), False)


def setting(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The value of one of SGLang's own variables that is no switch, in lower case; None where it is not set."""
    value = (os.environ if environ is None else environ).get(name)
    return None if value is None else value.strip().lower()


def asked(attribute: str, environ: Mapping[str, str] | None = None, *, malformed: bool = True) -> bool:
    """Whether the environment switches a boolean flag on, that is off by default; `malformed` is what no boolean counts as.

    For who prepares what a flag asks for where SGLang swallows errors: `read` says later what is wrong with a value.
    """
    value = (os.environ if environ is None else environ).get(f"{PREFIX}{attribute.upper()}")
    return value is not None and _BOOLS.get(value.strip().lower(), malformed)


def read(environ: Mapping[str, str] | None = None) -> Flags:
    """Parse the plugin's variables from `environ` (the process's own when None).

    Raises:
        SpecverifyError: an unknown `SGLANG_SPECVERIFY_*` name, or a value out of range.
    """
    environ = os.environ if environ is None else environ
    known = {flag.name: flag for flag in FLAGS}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise SpecverifyError(f"{name} is not a flag of this plugin", f"{hint}`specverify env` lists the flags")
    return Flags(**{flag.attribute: parse(flag, environ.get(flag.name, flag.default)) for flag in FLAGS})  # type: ignore[arg-type]
