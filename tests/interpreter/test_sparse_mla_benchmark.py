"""`benchmarks.sparse_mla` in Triton's interpreter: its arms, its gate, its command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import sparse_mla, sparse_mla_arms, sparse_mla_measure, sparse_mla_points, sparse_mla_report
from benchmarks import sparse_mla_v4 as v4
from benchmarks.sparse_mla_arms import ARMS, Arm, Call, Output, pytorch
from benchmarks.sparse_mla_gather import gather
from benchmarks.sparse_mla_points import Point
from benchmarks.sparse_mla_pool import Inputs, Pool, inputs_over, make_pool

CHAIN = list(sparse_mla_points.tiny())[-1]
NAMED = {arm.name: arm for arm in ARMS}


@pytest.fixture(scope="module")
def pool(device: str) -> Pool:
    return make_pool(torch.device(device), sparse_mla.TINY_MAIN, sparse_mla.TINY_SWA)


def test_rows_are_gathered_as_the_oracle_reads_them(pool: Pool) -> None:
    made = inputs_over(pool, Point(1, 24, 8, 2, 20))
    point = made.point
    out = torch.full((point.rows, point.keys, 512), float("nan"), dtype=torch.bfloat16, device=pool.device)
    gather(made, made.own_windows(1).flatten(0, 1), made.selected[1].flatten(0, 1), out)
    want = torch.stack([made.keys(1, row, v4_bytes=False) for row in range(point.rows)])
    assert torch.equal(out.double(), want)


@pytest.fixture
def few_arms(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> Iterator[None]:
    """Those that run everywhere: what SGLang has wants a GPU."""
    monkeypatch.setattr(sparse_mla, "make_pool", lambda *sizes: pool)
    monkeypatch.setattr(sparse_mla, "ARMS", tuple(NAMED[name] for name in ("specverify", "rows apart", "pytorch")))
    # A chain alone: it runs all three.
    monkeypatch.setattr(sparse_mla_points, "tiny", lambda: iter([CHAIN, Point(1, 0, 16, 1, 16)]))
    yield


def test_a_dry_run_holds_the_arms_to_the_oracle(few_arms: None, device: str, tmp_path: Path) -> None:
    if device != "cpu":
        pytest.skip("a dry run takes Triton's interpreter")
    file = tmp_path / "dry.json"
    ran = CliRunner().invoke(_app(), ["--device", "cpu", "--dry-run", "--out", str(file)])
    assert ran.exit_code == 0, ran.output
    results = json.loads(file.read_text())
    first, second = results["points"]
    assert {name for name, arm in first["arms"].items() if "why" not in arm} == {"specverify", "rows apart", "pytorch"}
    assert second["arms"]["rows apart"]["why"].startswith("one query row")
    assert all(0 < arm["error"] < 5e-3 for arm in first["arms"].values())
    assert results["ceilings"] is None and results["peers"].keys() == {"sgl-flash-mla"}
    assert "not timed" in ran.output
    # What is there is not measured again.
    resumed = ["--device", "cpu", "--dry-run", "--out", str(file), "--resume", str(file)]
    again = CliRunner().invoke(_app(), [*resumed, "--minutes", "0"])
    assert again.exit_code == 0 and "out of time" not in again.output
    assert len(json.loads(file.read_text())["points"]) == 2
    results["peers"] = {"sgl-flash-mla": "another"}
    file.write_text(json.dumps(results))
    assert CliRunner().invoke(_app(), resumed).exit_code == 2, "another peer's times are not comparable"


def _app() -> object:
    import typer

    app = typer.Typer()
    app.command()(sparse_mla.main)
    return app


def broken(kind: str) -> Arm:
    """PyTorch's arm with a fault."""

    def build(made: Inputs) -> Call:
        call = pytorch(made)
        faulty = replace(made, selected=made.selected.clone())
        # One selected row of every query row is another one.
        faulty.selected[..., 3] = faulty.selected[..., 4]
        other, without = pytorch(faulty), pytorch(replace(made, sink=torch.full_like(made.sink, -30.0)))
        return {
            "a wrong key": other,
            "no sink": without,
            "another layer": lambda layer: call(0),
            "half a bit": lambda layer: Output((call(layer).out.float() * 1.01).to(torch.bfloat16)),
            "rows in another order": lambda layer: Output(call(layer).out.flip(0)),
            "not finite": lambda layer: Output(call(layer).out.index_fill(0, torch.tensor([0]), float("nan"))),
        }[kind]

    return Arm(kind, "yardstick", build)


@pytest.mark.parametrize("kind", ["a wrong key", "no sink", "another layer", "half a bit", "rows in another order", "not finite"])
def test_the_gate_sees(kind: str, pool: Pool) -> None:
    row = sparse_mla_measure.measure(CHAIN, [broken(kind), NAMED["pytorch"]], None, pool)
    assert row["arms"][kind]["why"].startswith("wrong: layer"), row
    assert "why" not in row["arms"]["pytorch"]


def test_arms_that_read_584_bytes_are_held_to_those(pool: Pool) -> None:
    """FlashMLA's rows are rounded otherwise: the oracle of the other bytes rejects what is right for these."""
    made = inputs_over(pool, CHAIN)

    def build(_: Inputs) -> Call:
        def call(layer: int) -> Output:
            return Output(sparse_mla_measure.oracle(made, layer, v4_bytes=True).out[0].to(torch.bfloat16))

        return call

    arms = [Arm("own bytes", "stock", build, v4_bytes=True), Arm("others", "stock", build)]
    found = sparse_mla_measure.measure(CHAIN, arms, None, pool)["arms"]
    assert "why" not in found["own bytes"] and found["others"]["why"].startswith("wrong")


def test_a_report_of_a_dry_run_has_no_verdict(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    row = sparse_mla_measure.measure(CHAIN, [NAMED["pytorch"]], None, pool)
    sparse_mla_report.show({"points": [row], "ceilings": None})
    assert CHAIN.name in capsys.readouterr().out


class FlashMla:
    """What the arms ask of FlashMLA, in PyTorch: the arguments' shapes and dtypes as its documentation has them."""

    def get_mla_metadata(self) -> tuple[object, None]:
        return object(), None

    def flash_mla_with_kvcache(
        self, *, q: torch.Tensor, k_cache: torch.Tensor, block_table: None, cache_seqlens: None, head_dim_v: int,
        tile_scheduler_metadata: object, softmax_scale: float, is_fp8_kvcache: bool, indices: torch.Tensor,
        topk_length: torch.Tensor, attn_sink: torch.Tensor, extra_k_cache: torch.Tensor | None = None,
        extra_indices_in_kvcache: torch.Tensor | None = None, extra_topk_length: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert q.shape[1:] == (1, 64, 512) and head_dim_v == 512 and is_fp8_kvcache
        rows = [v4.read(k_cache, indices.flatten()).view(len(q), -1, 512)]
        assert indices.shape[:2] == (len(q), 1) and topk_length.tolist() == [indices.shape[2]] * len(q)
        if extra_k_cache is not None:
            assert extra_indices_in_kvcache is not None and extra_topk_length is not None
            assert extra_topk_length.tolist() == [extra_indices_in_kvcache.shape[2]] * len(q)
            rows.append(v4.read(extra_k_cache, extra_indices_in_kvcache.flatten()).view(len(q), -1, 512))
        return self._attend(q[:, 0], torch.cat(rows, dim=1), softmax_scale, attn_sink)[:, None], None

    def flash_mla_sparse_fwd(
        self, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int, attn_sink: torch.Tensor
    ) -> tuple[torch.Tensor]:
        assert kv.dtype == torch.bfloat16 and indices.dtype == torch.int32 and q.shape[1] == 64 and d_v == 512
        return (self._attend(q, kv[indices[:, 0].long(), 0].double(), sm_scale, attn_sink),)

    @staticmethod
    def _attend(q: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor) -> torch.Tensor:
        assert sink.shape == q.shape[1:2] and sink.dtype == torch.float32
        z = torch.cat([scale * (q.double() @ keys.transpose(1, 2)), sink.double()[None, :, None].expand(len(q), -1, 1)], dim=2)
        return (torch.softmax(z, dim=2)[..., :-1] @ keys).to(torch.bfloat16)


@pytest.mark.parametrize("point", [CHAIN, Point(1, 0, 64, 1, 32)], ids=lambda point: point.name)
def test_the_peers_are_called_with_what_they_are_to_read(
    point: Point, pool: Pool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_mla_arms, "_flash_mla", FlashMla)
    names = ["flashmla", "gather + flashmla"]
    found = sparse_mla_measure.measure(point, [NAMED[name] for name in names], None, pool)["arms"]
    assert all("why" not in found[name] and found[name]["error"] < 3e-3 for name in names), found
