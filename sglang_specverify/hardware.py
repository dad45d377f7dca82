"""The one module that knows hardware: what is here, what a name means, which bases run on it.

Nothing is imported from torch or sglang at import time, so that facts and rules can be asked
anywhere, also for a machine that is not this one.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from sglang_specverify.errors import SpecverifyError


@dataclass(frozen=True)
class FamilyFacts:
    """What one hardware family can run.

    `preference` holds the bases to choose from, best first; `possible` holds every base that runs
    there at all, for `SGLANG_SPECVERIFY_BASE`.
    """

    display: str
    preference: tuple[str, ...]
    possible: tuple[str, ...]


FAMILIES: dict[str, FamilyFacts] = {
    "sm90": FamilyFacts("SM90", ("fa3", "triton"), ("fa3", "fa4", "triton")),
    "sm100": FamilyFacts("SM100", ("fa4", "triton"), ("fa4", "triton")),
    "sm103": FamilyFacts("SM103", ("fa4", "triton"), ("fa4", "triton")),
    "sm107": FamilyFacts("SM107", ("fa4", "triton"), ("fa4", "triton")),
    "gfx942": FamilyFacts("gfx942", ("aiter", "triton"), ("aiter", "triton")),
    "gfx95x": FamilyFacts("gfx95x", ("aiter", "triton"), ("aiter", "triton")),
    "none": FamilyFacts("no GPU", ("triton",), ("triton",)),
    "other": FamilyFacts("other hardware", ("triton",), ("triton",)),
}


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator, as many times as it is there.

    Attributes:
        vendor: "nvidia", "amd", "none" (no GPU) or "other".
        arch: "sm_90", "gfx950", "none", … as the vendor's compiler spells it, without suffixes.
        name: the product's name, for people.
        count: how many are visible to this process.
        memory_bytes: memory of the first one; 0 where not known.
        multiprocessors: of the first one; 0 where not known.
    """

    vendor: str = "none"
    arch: str = "none"
    name: str = "no GPU"
    count: int = 0
    memory_bytes: int = 0
    multiprocessors: int = 0

    @property
    def family(self) -> str:
        """The key into `FAMILIES`."""
        if self.vendor == "none":
            return "none"
        if self.vendor == "nvidia":
            family = self.arch.replace("_", "")
            return family if family in FAMILIES else "other"
        if self.vendor == "amd":
            return "gfx95x" if self.arch.startswith("gfx95") else "gfx942" if self.arch == "gfx942" else "other"
        return "other"

    @property
    def facts(self) -> FamilyFacts:
        return FAMILIES[self.family]

    @property
    def display(self) -> str:
        """A short name for messages: the family's, or the architecture where it has no family."""
        return self.arch if self.family == "other" else self.facts.display

    @property
    def has_gpu(self) -> bool:
        return self.vendor != "none"

    @property
    def possible_bases(self) -> tuple[str, ...]:
        """Every base that runs here, models and caches aside."""
        # FA3's kernels cover SM80 to SM90, and SGLang lets it start on SM8x.
        ampere = self.vendor == "nvidia" and re.fullmatch(r"sm_8\d", self.arch) is not None
        return ("fa3", "triton") if ampere else self.facts.possible


NO_GPU = Hardware()

#: (vendor, architecture, names that mean it); `from_name` also takes the architecture itself.
_NAMES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("nvidia", "sm_80", ("A100", "A30")),
    ("nvidia", "sm_86", ("A10", "A40")),
    ("nvidia", "sm_89", ("L4", "L40", "L40S")),
    ("nvidia", "sm_90", ("H20", "H100", "H200", "GH200")),
    ("nvidia", "sm_100", ("B100", "B200", "GB200")),
    ("nvidia", "sm_103", ("B300", "GB300")),
    ("nvidia", "sm_107", ()),
    ("nvidia", "sm_110", ()),
    ("nvidia", "sm_120", ("RTX 5090",)),
    ("nvidia", "sm_121", ("GB10",)),
    ("amd", "gfx90a", ("MI210", "MI250", "MI250X")),
    ("amd", "gfx942", ("MI300A", "MI300X", "MI325X")),
    ("amd", "gfx950", ("MI350X", "MI355X")),
    ("none", "none", ("cpu", "no GPU")),
)


def _key(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(sm\d+)[af]$", r"\1", key)


def names() -> tuple[str, ...]:
    """Every name that `from_name` takes, without "auto"."""
    return tuple(name for _, arch, products in _NAMES for name in (arch, *products))


def from_name(name: str) -> Hardware:
    """One accelerator by architecture or product: "sm_90", "SM90", "H200", "gfx950", "none"; "auto" means this machine's.

    Raises:
        SpecverifyError: a name that means none of them.
    """
    if _key(name) == "auto":
        return detect()
    for vendor, arch, products in _NAMES:
        if _key(name) in {_key(known) for known in (arch, *products)}:
            return NO_GPU if vendor == "none" else Hardware(vendor, arch, _product(name, arch, products), 1)
    raise SpecverifyError(f"{name!r} is no hardware this plugin has a name for", f"use auto or one of: {', '.join(names())}")


def _product(name: str, arch: str, products: tuple[str, ...]) -> str:
    return next((product for product in products if _key(product) == _key(name)), arch)


@functools.cache
def detect() -> Hardware:
    """What this process sees through torch; `NO_GPU` where torch sees nothing or is not installed.

    Starts the device runtime. In SGLang's launcher use `from_sglang_platform`, which does not.

    Raises:
        SpecverifyError: torch is installed and does not import.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return NO_GPU
        raise SpecverifyError(f"torch does not import: {error}", "repair or reinstall torch in this environment") from None
    if not torch.cuda.is_available():
        return NO_GPU
    try:
        properties = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        # A GPU that does not answer is not "no GPU": nothing may be served on the CPU in its name.
        return Hardware("other", "unknown", f"a GPU that torch cannot query ({type(error).__name__})", 1)
    if torch.version.hip is not None:
        vendor, arch = "amd", str(properties.gcnArchName).split(":")[0]
    elif torch.version.cuda is not None:
        vendor, arch = "nvidia", f"sm_{properties.major}{properties.minor}"
    else:
        vendor, arch = "other", "unknown"
    return Hardware(vendor, arch, properties.name, count, int(properties.total_memory), int(properties.multi_processor_count))


#: SGLang's yes/no facts and the architecture each means when the exact number is not known.
_SM_FACTS = (("is_sm90", 9), ("is_sm100", 10), ("is_sm110", 11), ("is_sm120", 12))


def from_sglang_platform(platform: Any, device: str | None = None) -> Hardware:
    """The hardware that SGLang's platform facts describe, overridden ones included.

    Args:
        platform: `sglang.srt.runtime_context.get_platform()`, or any object with its attributes.
        device: the server's `device`; "cpu" means no GPU whatever the machine has.

    The yes/no facts decide and `device_sm` (10 · major + minor) refines them, because a test or a
    tool that overrides only `is_sm100` on another machine leaves the real `device_sm` in place.
    Count and memory are left at 1 and 0: asking for them would start the device runtime.
    """
    if device == "cpu":
        return NO_GPU
    number = int(platform.device_sm or 0)
    if platform.is_hip:
        # ROCm reports gfx942 as capability 9.4 and gfx950 as 9.5.
        arch = {94: "gfx942", 95: "gfx950"}.get(number, "unknown")
        return Hardware("amd", arch, arch, 1)
    major = next((major for fact, major in _SM_FACTS if getattr(platform, fact)), None)
    if major is not None:
        arch = f"sm_{number}" if number // 10 == major else f"sm_{major}0"
        return Hardware("nvidia", arch, arch, 1)
    if platform.is_cuda:
        arch = f"sm_{number}" if number else "unknown"
        return Hardware("nvidia", arch, arch, 1)
    if platform.is_npu or platform.is_xpu or platform.is_musa or platform.is_mps:
        return Hardware("other", "unknown", "an accelerator of another vendor", 1)
    return NO_GPU
