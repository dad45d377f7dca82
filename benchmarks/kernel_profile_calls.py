"""What `benchmarks.kernel_profile` profiles: calls that missed an aim, and others by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import points, sparse_mla_arms, sparse_mla_points
from benchmarks.kernel_profile_child import ARMS, SELECTED
from benchmarks.points import Point
from benchmarks.sparse_mla_points import Point as SparsePoint
from sglang_specverify.errors import ArgumentError


@dataclass(frozen=True)
class Call:
    """One call to profile.

    Attributes:
        point: of verify attention or a draft decode, or of sparse MLA.
        arm: an arm's name, or "selected", which sparse MLA has not.
        missed: the aim that it missed, for people.
    """

    point: Point | SparsePoint
    arm: str = SELECTED
    missed: str = ""

    @property
    def is_sparse(self) -> bool:
        return isinstance(self.point, SparsePoint)

    @property
    def name(self) -> str:
        return f"{self.point.name}, {self.arm}"

    def job(self, do: str, arm: str | None = None) -> dict[str, Any]:
        of = "sparse" if self.is_sparse else "dense"
        return {"do": do, "of": of, "point": self.point.as_dict(), "arm": arm or self.arm}


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

_OURS = sparse_mla_arms.SELECTED
#: The same of sparse MLA. `benchmarks.sparse_mla_report` has the aims.
MISSED_SPARSE = (
    Call(SparsePoint(1, 512), _OURS, "8 µs"),
    Call(SparsePoint(128, 512), _OURS, "20 µs"),
    Call(SparsePoint(32, 512), _OURS, "1.5 × FlashMLA"),
    Call(SparsePoint(64, 512), _OURS, "1.5 × FlashMLA"),
    Call(SparsePoint(1, 512, 64, 6), _OURS, "1.3 × the floor"),
    Call(SparsePoint(1, 512, 64, 6, shared=True), _OURS, "1.3 × the floor"),
    Call(SparsePoint(8, 512, 64, 6), _OURS, "1.3 × the floor"),
    Call(SparsePoint(128, 512), "flashmla", "none: it is what that call is compared with"),
    Call(SparsePoint(64, 512), "flashmla", "none: it is what that call is compared with"),
)
TINY_SPARSE = (Call(SparsePoint(2, 32, 16, 1, 16), _OURS), Call(SparsePoint(1, 16, 8, 3, 16, shared=True), _OURS))
#: Calls of each name that `--only` takes: on a GPU, and in a dry run.
LISTS = {"dense": (MISSED, TINY), "sparse": (MISSED_SPARSE, TINY_SPARSE)}


def parse(text: str) -> Call:
    """The call that "NAME OF A POINT = ARM" means; what is selected, if it has no arm, or this project's sparse MLA.

    Raises:
        ArgumentError: a point or an arm of no such name.
    """
    name, _, arm = (part.strip() for part in text.partition("="))
    selections = (*points.SELECTIONS.values(), *sparse_mla_points.SELECTIONS.values())
    listed = [call for calls in LISTS.values() for some in calls for call in some]
    known: dict[str, Point | SparsePoint] = {point.name: point for selection in selections for point in selection()}
    known |= {call.point.name: call.point for call in listed}
    if name not in known:
        raise ArgumentError(
            "--call", repr(name), "the name of a point in benchmarks/points.py or benchmarks/sparse_mla_points.py"
        )
    is_sparse = isinstance(known[name], SparsePoint)
    arms = [each.name for each in sparse_mla_arms.ARMS] if is_sparse else [SELECTED, *ARMS]
    arm = arm or (_OURS if is_sparse else SELECTED)
    if arm not in arms:
        raise ArgumentError("--call", repr(arm), ", ".join(arms))
    own = Call(known[name], arm)
    return next((call for call in listed if call.name == own.name), own)
