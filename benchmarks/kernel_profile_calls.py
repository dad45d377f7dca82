"""What `benchmarks.kernel_profile` profiles: calls that missed an aim, and others by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import points
from benchmarks.kernel_profile_child import ARMS, SELECTED
from benchmarks.points import Point
from sglang_specverify.errors import ArgumentError


@dataclass(frozen=True)
class Call:
    """One call to profile.

    Attributes:
        arm: an arm's name, or "selected".
        missed: the aim that it missed, for people.
    """

    point: Point
    arm: str = SELECTED
    missed: str = ""

    @property
    def name(self) -> str:
        return f"{self.point.name}, {self.arm}"

    def job(self, do: str, arm: str | None = None) -> dict[str, Any]:
        return {"do": do, "point": self.point.as_dict(), "arm": arm or self.arm}


#: In order of importance. `benchmarks.aims` has the aims.
MISSED = (
    Call(Point("chain", 1, 4, 8192), missed="14 µs"),
    Call(Point("tree", 32, 128, 2048), missed="1.15 × fa3's prefix pass"),
    Call(Point("draft", 1, 8, 8192), missed="2 × as fast as stock fa3"),
    Call(Point("chain", 4, 4, 2048), missed="3 × as fast as upstream's split-KV"),
    Call(Point("chain", 1, 4, 384), missed="10 × as fast as stock triton"),
    Call(Point("tree", 8, 64, 128), missed="3 × as fast as stock fa3 and triton"),
    Call(Point("draft", 4, 16, 2048), missed="2 × as fast as stock fa3"),
    Call(Point("tree", 32, 128, 2048), "fa3_prefix", "none: it is what that tree is compared with"),
    Call(Point("tree", 1, 64, 32768), missed="none, but far from its floor"),
    Call(Point("tree", 8, 64, 16384), missed="none, but far from its floor"),
)
_SHAPE: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 32}
TINY = (Call(Point("chain", 1, 4, 200, **_SHAPE)), Call(Point("tree", 1, 6, 40, **_SHAPE)))


def parse(text: str) -> Call:
    """The call that "NAME OF A POINT = ARM" means; what is selected, if it has no arm.

    Raises:
        ArgumentError: a point or an arm of no such name.
    """
    name, _, arm = (part.strip() for part in text.partition("="))
    arm = arm or SELECTED
    known = {point.name: point for selection in points.SELECTIONS.values() for point in selection()}
    known |= {call.point.name: call.point for call in (*MISSED, *TINY)}
    if name not in known:
        raise ArgumentError("--call", repr(name), "the name of a point in benchmarks/points.py")
    if arm not in (SELECTED, *ARMS):
        raise ArgumentError("--call", repr(arm), ", ".join((SELECTED, *ARMS)))
    own = Call(known[name], arm)
    return next((call for call in MISSED if call.name == own.name), own)
