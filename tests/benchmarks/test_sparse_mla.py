"""Sparse MLA decode beside its peers: points, the peers' rows of 584 bytes, verdicts, the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import record, sparse_mla, sparse_mla_points, sparse_mla_report, sparse_mla_tables
from benchmarks import sparse_mla_v4 as v4
from benchmarks.sparse_mla_arms import ARMS
from benchmarks.sparse_mla_measure import sampled
from benchmarks.sparse_mla_points import MAIN_ROWS, SWA_ROWS, Point, layers
from benchmarks.sparse_mla_pool import PAGE_ROWS, inputs_over, make_pool

CPU = torch.device("cpu")


def test_every_size_is_measured_once_and_the_headline_first() -> None:
    chosen = sparse_mla.select(list(sparse_mla.Selection), quick=False)
    apart, shared = [p for p in chosen if not p.shared], [p for p in chosen if p.shared]
    assert len(apart) == len(set(apart)) == 5 * 3 * 3 * 3
    # One list for a request's rows: of 16 and 64 heads, where a row selects any.
    assert len(shared) == len(set(shared)) == 5 * 2 * 2 * 2 and all(p.queries > 1 and p.topk for p in shared)
    assert len({p.name for p in chosen}) == len(chosen)
    assert {(p.batch, p.topk) for p in chosen[:15]} == {(b, k) for b in (1, 8, 32, 64, 128) for k in (0, 128, 512)}
    assert {(p.heads, p.queries) for p in chosen[:15]} == {(64, 1)}
    assert {(p.heads, p.queries) for p in chosen} == {(h, s) for h in (16, 64, 128) for s in (1, 4, 6)}
    assert set(sparse_mla.Selection) == set(sparse_mla_points.SELECTIONS)
    for point in chosen:
        count = layers(point)
        assert count >= 2 and count * point.window_rows <= SWA_ROWS
        assert count * point.lists * point.topk <= MAIN_ROWS
    with pytest.raises(ValueError, match="too small for B 64"):
        layers(Point(64, 512), 1 << 15, SWA_ROWS)


def test_what_verify_is_for_is_measured_first() -> None:
    found = sparse_mla.select([sparse_mla.Selection.VERIFY], quick=False)
    first = [(p.heads, p.queries) for p in found[:16]]
    assert first == [(16, 1)] * 6 + [(16, 6)] * 10 and max(p.batch for p in found[:16]) == 8
    assert {(p.heads, p.queries) for p in found[16:41]} == {(64, 6)}
    assert {p for p in found if p.queries > 1} == {
        Point(b, k, h, s, shared=one)
        for b in (1, 8, 32, 64, 128) for k in (0, 128, 512) for h in (16, 64) for s in (4, 6) for one in (False, k > 0)
    }  # fmt: skip


def test_bytes_and_flops() -> None:
    """H 64, Sq 1, B 128, K 512: 27.5 MB of rows, 44.7 MB with q and output, 13.6 us at 790 TFLOP/s."""
    point = Point(128, 512)
    assert point.cache_bytes / 1e6 == pytest.approx(27.5, abs=0.05)
    assert point.bytes / 1e6 == pytest.approx(44.7, rel=0.01)
    assert point.flops / 790e6 == pytest.approx(13.6, abs=0.05)
    # Rows of a chain share their window, and not what they select.
    assert Point(1, 512, 16, 6).cache_bytes == 133 * 528 + 6 * 512 * 288
    assert Point(1, 512, 16, 6, shared=True).cache_bytes == 133 * 528 + 512 * 288


def test_rows_of_584_bytes_are_those_of_sglang() -> None:
    """Written here, read by SGLang's own reference and here: the same values, and near the source."""
    from sglang.test.kernels.deepseek_v4.k_cache_reference import dequantize_k_cache_paged_ref

    source = torch.randn(128, 512, generator=torch.Generator().manual_seed(3))
    source[5, :64], source[6, 64:128], source[7, 128:192] = 0.0, 448 * 2.0**-4, 1e-5
    source = source.to(torch.bfloat16)
    cache = v4.allocate(3, 64, CPU)
    assert cache.stride(0) % 576 == 0
    v4.write(cache, 1, source)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(4)) + 64
    padded = torch.as_strided(cache, (3, cache.stride(0)), (cache.stride(0), 1))
    theirs = dequantize_k_cache_paged_ref(padded, slots.int(), 64)[:, 0]
    ours = v4.read(cache, slots)
    assert torch.equal(ours, theirs.double())
    want = source[slots - 64].double()
    assert torch.equal(ours[:, 448:], want[:, 448:])
    # Half a spacing of E4M3 at the most, and of its subnormal numbers at the group's scale.
    error, scale = (ours - want).abs(), want[:, :448].unflatten(1, (7, 64)).abs().amax(2, keepdim=True).expand(-1, -1, 64)
    assert bool((error[:, :448] <= want[:, :448].abs() * 2.0**-4 + scale.flatten(1) * 2.0**-17).all())
    # 448 * 2^-4 needs a scale of exactly 2^-4, and not the next.
    assert padded[1, 64 * 576 + 6 * 8 + 1] == 127 - 4


def test_all_arms_read_the_same_rows() -> None:
    pool = make_pool(CPU, 4 * PAGE_ROWS, 4 * PAGE_ROWS)
    made = inputs_over(pool, Point(2, 16, 8, 3, 16))
    for row in range(made.point.rows):
        near, far = (made.keys(1, row, v4_bytes=kind) for kind in (False, True))
        assert near.shape == far.shape == (32, 512)
        # Both are the same source; FP4 rounds by some 10 % of a row's size.
        assert float((near - far).norm() / far.norm()) < 0.15
    assert torch.equal(made.own_windows(1)[1, 2], made.windows[1, 1, 2:18])
    # No row twice within a list of layers: what one call read does not help the next.
    assert made.windows.unique().numel() == made.windows.numel() and made.selected.unique().numel() == made.selected.numel()


def test_sampled_rows_have_both_ends() -> None:
    assert sampled(1) == [0] and sampled(5) == [0, 1, 2, 3, 4]
    assert sampled(768)[0] == 0 and sampled(768)[-1] == 767 and len(sampled(768)) == 24


def test_unknown_arms_and_a_cpu_to_time_on_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="no arm flashmlaa"):
        sparse_mla.arms_of(["flashmlaa"], "cuda", dry_run=False)
    with pytest.raises(typer.BadParameter, match="dry-run"):
        sparse_mla.arms_of([], "cpu", dry_run=False)
    assert [arm.name for arm in sparse_mla.arms_of(["pytorch"], "cuda", dry_run=False)] == [a.name for a in ARMS[:-1]]
    assert {arm.name for arm in ARMS} == {sparse_mla_report.OURS, *sparse_mla_report.OTHERS}


def measured(point: Point, **times: float) -> dict[str, Any]:
    arms = {name.replace("_", " "): {"group": "x", "warm": {"us": us}, "cold": {"us": us + 1}} for name, us in times.items()}
    return {"name": point.name, "point": point.as_dict(), "bytes": 10**7, "flops": 10**9, "floor_us": 2.0, "arms": arms}


RESULTS = {
    "ceilings": {"copy_tb_per_s": 4.2, "matmul_tflops": 760.0},
    "points": [
        measured(Point(1, 512), specverify=7.5, flashmla=12.0),
        measured(Point(128, 512), specverify=20.0, flashmla=29.0, pytorch=900.0),
        measured(Point(8, 0), specverify=9.0, flashmla=9.0),
        measured(Point(8, 512, 16), specverify=9.0, flashmla=9.0),
        {"name": "B 64 K 512 H 64 Sq 1", "point": Point(64, 512).as_dict(), "why": "RuntimeError: gone"},
    ],
}


def test_verdicts() -> None:
    ratio, least, most, *none = sparse_mla_report.judge(RESULTS)
    assert [line[2:] for line in none] == [["not measured"] * 2] * 2
    assert ratio[1:] == [">= 1.5", "FAIL 1/2; B 128 K 512 H 64 Sq 1: 1.45", "FAIL 1/2; B 128 K 512 H 64 Sq 1: 1.43"]
    assert least[1:] == ["<= 8", "pass 1/1", "FAIL 0/1; B 1 K 512 H 64 Sq 1: 8.50"]
    assert most[1:] == ["<= 20", "pass 1/1", "FAIL 0/1; B 128 K 512 H 64 Sq 1: 21.00"]
    assert sparse_mla_report.judge({"points": []})[0][2:] == ["not measured", "not measured"]
    first, *_, failed = (sparse_mla_report.cells(row, "warm") for row in RESULTS["points"])
    assert first == ["B 1 K 512 H 64 Sq 1", "2.0", "7.5", "", "0.27", "", "12.0", "", "", "", "1.60"]
    assert failed[1] == "RuntimeError: gone" and len(failed) == len(sparse_mla_report.COLUMNS)


def test_several_rows_are_told_beside_one() -> None:
    points = [Point(8, 512, 16), Point(8, 512, 16, 6), Point(8, 512, 16, 6, shared=True), Point(1, 512, 64, 4)]
    times = [
        {"specverify": 8.0},
        {"specverify": 24.0, "flashmla": 36.0},
        {"specverify": 10.0, "rows_apart": 25.0},
        {"flashmla": 9.0},
    ]
    found = {"points": [measured(point, **time) for point, time in zip(points, times, strict=True)]}
    few, others = sparse_mla_report.judge(found)[3:]
    assert few[1:] == ["<= 2.5", "FAIL 1/2; B 8 K 512 H 16 Sq 6: 3.00", "FAIL 1/2; B 8 K 512 H 16 Sq 6: 2.78"]
    assert others[2:] == ["not measured"] * 2
    wide = {"points": [measured(Point(8, 512, 64, 6), specverify=2.5), measured(Point(1, 0, 64, 6), specverify=3.0)]}
    assert sparse_mla_report.judge(wide)[4][2] == "FAIL 1/2; B 1 K 0 H 64 Sq 6: 1.50"
    assert sparse_mla_report.chains(found, "warm") == [
        ["B 8 K 512 H 16 Sq 6", "24.0", "", "1.50", "3.00"],
        ["B 8 K 512 H 16 Sq 6 one list", "10.0", "2.50", "", "1.25"],
    ]  # fmt: skip


def test_the_table_of_a_page() -> None:
    lines = sparse_mla_tables.peers(RESULTS)
    assert len(lines) == 2 + 15 and {line.count("|") for line in lines} == {9}
    assert "| 1 | 512 | 7.5 / 8.5 | 12.0 / 13.0 | not run | not run | not run | 1.60 / 1.53 |" in lines
    assert "| 64 | 512 | not run | not run | not run | not run | not run | not run |" in lines


def test_the_picture(tmp_path: Path) -> None:
    plot = pytest.importorskip("benchmarks.sparse_mla_plot")
    assert plot.lines(RESULTS, 512) == {"specverify": ([1, 128], [8.5, 21.0]), "flashmla": ([1, 128], [13.0, 30.0]),
                                        "pytorch": ([128], [901.0])}  # fmt: skip
    assert plot.achieved(RESULTS)["H 64, Sq 1"][0] == (100.0, pytest.approx(1e9 / 8.5 / 1e6))
    pytest.importorskip("matplotlib")
    plot.draw(RESULTS, tmp_path / "sparse.png")
    assert (tmp_path / "sparse.png").stat().st_size > 10_000


@pytest.mark.parametrize("new_arms", [False, True])
def test_rows_without_an_arm_of_this_run_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_arms: bool
) -> None:
    first, second, third, failing = sparse_mla_points.tiny()
    names = [arm.name for arm in ARMS if arm.name != "pytorch"]

    def old(point: Point, arms: dict[str, Any]) -> dict[str, Any]:
        return {"name": point.name, "point": point.as_dict(), "selected": "specverify", "arms": arms}

    whole = {name: {"error": 0.001} for name in names}
    fewer = {name: found for name, found in whole.items() if name != "rows apart"}
    rows = [{**old(point, arms), "date": "then"} for point, arms in ((first, whole), (second, fewer), (failing, fewer))]
    path = tmp_path / "sparse.json"
    peers = {"sgl-flash-mla": sparse_mla._version("sgl-flash-mla")}
    record.write(path, {"earlier": [], "ceilings": None, "points": rows, "metadata": [], "peers": peers})
    taken: list[Point] = []

    def measure(point: Point, arms: Any, ceilings: None, pool: None) -> dict[str, Any]:
        taken.append(point)
        if point == failing:
            raise MemoryError("61 GB")
        return old(point, {arm.name: {"error": 0.002} for arm in arms})

    monkeypatch.setattr(sparse_mla.measuring, "measure", measure)
    monkeypatch.setattr(sparse_mla, "make_pool", lambda *_: None)
    repaired: list[str] = []
    monkeypatch.setattr("tests.interpreter.repair.apply", lambda: repaired.append("bf16"))
    app = typer.Typer()
    app.command()(sparse_mla.main)
    options = ["--dry-run", "--device", "cpu", "--resume", str(path), "--out", str(path), "--skip", "pytorch"]
    result = CliRunner().invoke(app, [*options, *["--new-arms"] * new_arms])
    assert result.exit_code == 0, result.output
    assert repaired == ["bf16"]
    assert taken == ([second, third, failing] if new_arms else [third])
    found = {row["name"]: row for row in json.loads(path.read_text())["points"]}
    assert len(found) == 4 and ("rows apart" in found[second.name]["arms"]) == new_arms
    # The old row stays where the new one says only why there is none.
    assert found[failing.name] == rows[2] and found[first.name] == rows[0]
