"""Tables of what ran on a GPU: what failed or did not run is marked, and a table without its file says so."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import docs, gpu_tables
from sglang_specverify.kernels.targets import TARGETS
from tests.gpu import sparse_mla_cases


def test_a_table_without_its_file_says_so() -> None:
    page = "<!-- made from nowhere.json: dsv4 seam -->\n| a | table |\n<!-- end -->\n"
    assert docs.made(page) == f"<!-- made from nowhere.json: dsv4 seam -->\n{docs.NOT_RUN}\n<!-- end -->\n"


def test_sparse_mla_cases() -> None:
    def row(query: str, name: str, *problems: str) -> dict[str, Any]:
        kernels = {"hopper_kernel" if query == "bf16" else "decode_kernel": 4, "combine_kernel": 4}
        return {"row": name, "query": query, "checks": 7, "kernels": kernels, "problems": list(problems)}

    rows = [row("bf16", "K 0"), row("e4m3", "K 0", "seed 1: off"), row("bf16", "controls")]
    calls = {("bf16", n): {"cases": 3, "checks": 4, "failures": 0, "problems": [], "kernels": {}} for n in range(2)}
    results = sparse_mla_cases.summary(rows, calls)
    results |= {"not run": ["e4m3, controls"], "processes that failed": ["e4m3, controls: exit code -6"]}
    assert gpu_tables.sparse_mla_cases(results) == [
        "| checks against the oracle | bf16 Q: hopper_kernel | e4m3 Q: decode_kernel |",
        "|---|---|---|",
        "| K 0 | 7 | 7 **FAILED** |",
        "| controls | 7 | not run |",
        "| random calls | 8 | not run |",
        "",
        "FAILED: e4m3, K 0: seed 1: off",
        "",
        "FAILED: e4m3, controls: exit code -6",
        "",
        "Not run: e4m3, controls.",
    ]


def test_dsv4_seam() -> None:
    rows = [
        {"name": "decode", "ok": True, "checks": 6, "reason": ""},
        {"name": "faults", "ok": False, "checks": 2, "reason": "a scale:\nwas not seen"},
        {"name": "store kernel", "ok": None, "checks": 0, "reason": "a CUDA kernel"},
    ]
    assert gpu_tables.dsv4_seam({"rows": rows, "not run": ["far pages"]})[2:] == [
        "| decode | 6 | ok |",
        "| faults | 2 | **FAILED** |",
        "| store kernel | 0 | not run: a CUDA kernel |",
        "",
        "FAILED: faults: a scale: was not seen",
        "",
        "Not run: far pages.",
    ]


@pytest.mark.parametrize(("problems", "mark"), [([], ""), (["1 of 22 requests\ndiffer"], " **FAILED**")])
def test_deterministic_server(problems: list[str], mark: str) -> None:
    greedy = {"of": 22, "batches": 21, "compared": 300, "differing requests": len(problems)}
    servers = {
        "plugin": {"problems": problems, "greedy": greedy, "sampled with a seed": {"differing requests": 0, "of": 22}},
        "other": {"problems": [], "greedy": greedy, "sampled with a seed": {"error": "refused"}},
        "silent": {"problems": ["TimeoutError: "]},
    }
    lines = gpu_tables.deterministic_server({"servers": servers})
    assert lines[2] == f"| plugin{mark} | 22 | 21 | 300 | {len(problems)} | 0 of 22 |"
    assert lines[3].endswith("| not run |") and lines[4] == "| silent **FAILED** | | | | | |"
    failed = [line for line in lines[5:] if line]
    assert failed == [*(["FAILED: plugin: 1 of 22 requests differ"] if problems else []), "FAILED: silent: TimeoutError:"]


def test_compile_all() -> None:
    row = {"launches": 40, "problems": 0, "accepted_spills": 3, "registers": 255, "shared_bytes": 65536}
    wrong = {f"sm_100 fused chain rows{n}": ["spills registers: 4 bytes"] for n in range(10)}
    architectures = {"sm_90": row, "sm_100": row | {"problems": 10}}
    table = gpu_tables.compile_all({"architectures": architectures, "problems": wrong, "only": None})
    assert table[2:4] == ["| sm_90 | 40 | 0 | 3 | 255 | 64 |", "| sm_100 | 40 | **10** | 3 | 255 | 64 |"]
    below = [line for line in table[4:] if line]
    assert below[0] == "FAILED: sm_100 fused chain rows0: spills registers: 4 bytes"
    assert below[8:] == ["FAILED: 2 others", "Not compiled as a whole: sm_103, sm_107, gfx942, gfx950."]
    part = gpu_tables.compile_all({"architectures": dict.fromkeys(TARGETS, row), "problems": {}, "only": "chain"})
    assert part[-1] == 'Not compiled as a whole: launches whose name does not hold "chain".'
    whole = gpu_tables.compile_all({"architectures": dict.fromkeys(TARGETS, row), "problems": {}, "only": None})
    assert len(whole) == 2 + len(TARGETS)
