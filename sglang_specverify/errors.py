"""The one exception type that the plugin raises on purpose."""

from __future__ import annotations

import sys
from types import TracebackType


class SpecverifyError(RuntimeError):
    """A condition the plugin refuses, with the way out of it.

    Args:
        what: one sentence: what came, and what is allowed.
        remedy: one sentence: what the user can do about it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what if not remedy else f"{what}\n  remedy: {remedy}")
        self.what = what
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[SpecverifyError], tuple[str, str]]:
        return (type(self), (self.what, self.remedy))


class ArgumentError(SpecverifyError, ValueError):
    """A kernel argument that cannot be served: names it, what came and what is allowed."""

    def __init__(self, argument: str, came: object, allowed: str) -> None:
        super().__init__(f"{argument}: got {came}; allowed: {allowed}")
        self.argument, self.came, self.allowed = argument, came, allowed

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, object, str]]:  # type: ignore[override]
        return (type(self), (self.argument, self.came, self.allowed))


def show_without_traceback() -> None:
    """Print a `SpecverifyError` that nobody caught as two plain lines instead of a traceback.

    Idempotent. Every other exception goes to the hook that was there before.
    """
    previous = sys.excepthook
    if getattr(previous, "_specverify", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, SpecverifyError):
            print(f"specverify: error: {error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, traceback)

    hook._specverify = True  # type: ignore[attr-defined]
    sys.excepthook = hook
