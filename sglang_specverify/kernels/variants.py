"""Which implementation of an operation serves a call."""

from __future__ import annotations

import torch

from sglang_specverify.errors import ArgumentError, SpecverifyError

#: Every implementation in this version, by the name that `variant` takes.
VARIANTS = ("reference",)


def check_variant(variant: str) -> None:
    """Raises `ArgumentError` for a name that is neither "auto" nor one of `VARIANTS`."""
    if variant not in ("auto", *VARIANTS):
        raise ArgumentError("variant", repr(variant), ", ".join(("auto", *VARIANTS)))


def choose_variant(variant: str, device: torch.device) -> str:
    """The implementation that serves a call on `device`.

    On a CPU "auto" is the reference. Elsewhere the reference runs only where asked for by name, since it waits for the
    device several times a request.

    Raises:
        ArgumentError: no such variant.
        SpecverifyError: it cannot serve this device, or a graph is being captured.
    """
    check_variant(variant)
    if device.type == "cpu":
        return "reference"
    if variant == "auto":
        raise SpecverifyError(
            f"no kernel for {device.type} is in this version; variants: {', '.join(VARIANTS)}",
            'pass variant="reference" for the slow FP64 reference (eager only), or CPU tensors',
        )
    if device.type == "meta":
        raise SpecverifyError("variant reference needs values, and meta tensors hold none", "pass tensors that hold data")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise SpecverifyError(
            "variant reference reads lengths on the host and cannot be captured into a graph",
            "call it outside the capture, or switch graphs off",
        )
    return "reference"
