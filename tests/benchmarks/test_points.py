"""The points of the comparison, and the bytes and FLOPs that each is said to need."""

from __future__ import annotations

import pytest

from benchmarks import points
from benchmarks.points import DRAFT_STEP, Point, Work, work


def test_the_grid_is_the_whole_product_once() -> None:
    grid = list(points.grid())
    assert len(grid) == len(set(grid)) == 5 * 6 * 6
    assert all(points.aimed_at(point) for point in grid[: sum(map(points.aimed_at, grid))])


@pytest.mark.parametrize("family", points.FAMILIES)
def test_a_family_has_about_a_quarter_of_the_grid(family: str) -> None:
    facts = points.FAMILIES[family]
    plain = Point("tree", 1, 4, 128)
    differs = {name: value for name, value in vars(plain).items() if name not in ("batch", "width", "length")} | facts
    mine = [p for p in points.families() if {name: getattr(p, name) for name in differs} == differs]
    assert 30 <= len(mine) <= 45
    # Every W and every batch size that the family allows is there.
    assert {p.width for p in mine} == set(points.WIDTHS)
    assert {p.batch for p in mine} >= {4, 8, 32, 64}
    assert any(points.aimed_at(p) for p in mine)


def test_every_selection_has_points_with_names_of_their_own() -> None:
    for selection in points.SELECTIONS.values():
        chosen = list(selection())
        assert len({point.name for point in chosen}) == len(chosen) > 0


def test_the_headline_holds_the_points_that_targets_name() -> None:
    headline = list(points.headline())
    assert len(headline) == 20
    for point in (Point("tree", 32, 128, 128), Point("tree", 32, 128, 2048), Point("chain", 1, 4, 8192)):
        assert point in headline[:5]


def test_mixed_lengths_spread_from_128_to_the_most_and_stay_the_same() -> None:
    point = Point("tree", 64, 4, 32768, mixed=True)
    lengths = point.lengths()
    assert lengths == point.lengths()
    assert min(lengths) >= 128 and max(lengths) <= 32768
    # Half of a log-uniform draw lies below the geometric mean, 2048: 64 draws leave 16 to 48 there but once in 10^4.
    assert 16 <= sum(length < 2048 for length in lengths) <= 48


def test_work_of_a_chain_by_hand() -> None:
    point = Point("chain", 2, 3, 10, q_heads=4, kv_heads=2, head_dim=64)
    found = work(point, [[0, 1, 2]] * 2, [[1, 2, 3]] * 2)
    io = 2 * (2 * 3) * 4 * 64 * 2
    kv = 2 * (2 * 13) * 2 * 64 * 2
    assert found == Work(io + kv, 4 * 64 * 4 * 2 * (11 + 12 + 13))


def test_work_of_a_tree_counts_its_mask_and_an_fp8_cache_half() -> None:
    point = Point("tree", 1, 3, 10, q_heads=4, kv_heads=2, head_dim=64, cache="e4m3")
    found = work(point, [[0, 1, 1]], [[1, 2, 2]])
    assert found == Work(2 * 3 * 4 * 64 * 2 + 2 * 13 * 2 * 64 + 9, 4 * 64 * 4 * (30 + 5))


def test_work_with_a_window_counts_what_rows_see_by_depth() -> None:
    point = Point("tree", 1, 3, 100, q_heads=1, kv_heads=1, head_dim=64, window=8)
    found = work(point, [[0, 1, 1]], [[1, 2, 2]])
    # The root sees 8 prefix keys, the others 7; 8 of them and 3 drafts are read.
    assert found == Work(2 * 3 * 64 * 2 + 2 * 11 * 64 * 2 + 9, 4 * 64 * (8 + 7 + 7 + 5))


def test_work_of_a_draft_step_counts_every_branch() -> None:
    point = Point("draft", 1, 2, 10, q_heads=1, kv_heads=1, head_dim=64)
    steps = DRAFT_STEP + 1
    found = work(point, [[DRAFT_STEP] * 2], [[steps] * 2])
    assert found == Work(2 * 2 * 64 * 2 + 2 * (10 + 2 * steps) * 64 * 2, 4 * 64 * 2 * (10 + steps))


def test_the_floor_is_the_longer_of_both() -> None:
    assert Work(4_000_000, 0).floor_us(4e12, 8e14) == pytest.approx(1.0)
    assert Work(4_000_000, 16 * 10**8).floor_us(4e12, 8e14) == pytest.approx(2.0)
