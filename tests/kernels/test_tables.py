"""Launch tables: the shipped ones, what a lookup finds, and the errors of a damaged file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sglang_specverify.errors import ArgumentError, SpecverifyError
from sglang_specverify.kernels import tables
from sglang_specverify.kernels.launch import LaunchConfig
from sglang_specverify.kernels.table_schema import KERNELS, OPTIONAL_KERNELS, Entry, Table, TableFacts, parse, render

ARCHES = ("sm_90", "sm_100", "sm_103", "sm_107", "gfx942", "gfx950")
FACTS = TableFacts(
    rows=16, head_dim=128, v_head_dim=128, cache_bits=16, q_bits=16, split=False, page_size=1, kind="chain"
)  # fmt: skip
LAUNCH = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "ctas_per_sm": 2}


def calls() -> Iterator[TableFacts]:
    """Calls of every size; batch 0 stands for the deterministic ones."""
    kinds: tuple[Any, ...] = ("chain", "qlen_only", "full_mask", "branches")
    rows_of, batches = (1, 4, 16, 17, 64, 128, 4096), (0, 1, 8, 64)
    dims = ((64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (128, 64))
    for rows, (k, v), bits, split, kind, batch in product(rows_of, dims, (8, 16), (True, False), kinds, batches):
        yield TableFacts(rows, k, v, bits, 16, split, 1, kind, 8 * rows * batch)


def entry(**changes: Any) -> dict[str, Any]:
    return {"when": {"rows": [1, 16]}, "launch": LAUNCH, "measured": False, "spill_bytes": 0} | changes


def table(*entries: dict[str, Any], **changes: Any) -> str:
    kernels = {"fused": list(entries), "tree_suffix": []}
    return json.dumps({"schema": 1, "arch": "sm_90", "triton": "3.8.0", "note": "a test", "kernels": kernels} | changes)


def test_every_architecture_has_a_table() -> None:
    assert set(tables.shipped()) == set(ARCHES)


@pytest.mark.parametrize("arch", ARCHES)
def test_shipped_tables_are_what_render_writes(arch: str) -> None:
    """So a file that was edited by hand keeps the layout of one that was tuned, and a difference shows only what changed."""
    shipped = tables.read(arch)
    assert shipped is not None
    text = (Path(__file__).parents[2] / "configs" / "kernels" / f"{arch}.json").read_text()
    assert render(shipped, json.loads(text).get("timings")) == text


@pytest.mark.parametrize("arch", ARCHES)
def test_every_entry_of_a_shipped_table_can_win(arch: str) -> None:
    shipped = tables.read(arch)
    assert shipped is not None
    for kernel, entries in shipped.kernels.items():
        won = {found[0] for facts in calls() if not isinstance(found := tables.find(arch, kernel, facts), str)}
        assert won == set(range(len(entries))), f"{arch} {kernel}: entries that nothing reaches, or calls() is too small"


@pytest.mark.parametrize("arch", ARCHES)
def test_deterministic_calls_have_a_measured_launch_where_others_have_one(arch: str) -> None:
    """They never say how full the device is, so they may not fall through conditions on that onto an entry for other calls."""
    shipped = tables.read(arch)
    assert shipped is not None
    for kernel, facts in product(shipped.kernels, calls()):
        if facts.total_rows > 0:
            others, alone = (tables.find(arch, kernel, f) for f in (facts, replace(facts, total_rows=0)))
            assert isinstance(others, str) == isinstance(alone, str), (kernel, facts)
            if not isinstance(others, str) and not isinstance(alone, str):
                assert others[1].measured <= alone[1].measured, (kernel, facts, others[0], alone[0])


@pytest.mark.parametrize("arch", [*ARCHES, "none", "sm_80", "sm_120", "gfx90a"])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel not in OPTIONAL_KERNELS])
def test_every_call_has_a_launch_for_its_architecture(arch: str, kernel: str) -> None:
    for facts in (*calls(), replace(FACTS, q_bits=32, cache_bits=32)):
        launch, reason = tables.lookup(arch, kernel, facts)
        assert arch in reason
        assert bool(launch.amd) <= arch.startswith("gfx")
        # A row block much larger than the rows would multiply padding.
        assert launch.block_m <= max(64, 2 * facts.rows)


@pytest.mark.parametrize(("dim", "keys", "stages"), [(64, 64, 4), (128, 128, 2)])
def test_the_specialised_kernel_has_the_launch_that_fills_a_multiprocessor(dim: int, keys: int, stages: int) -> None:
    facts = replace(FACTS, head_dim=dim, v_head_dim=dim)
    launch = LaunchConfig(128, keys, 4, stages, 1, max_registers=128)
    assert tables.rule("sm_90", "specialized", facts) == launch == tables.lookup("sm_90", "specialized", facts)[0]
    assert tables.find("sm_100", "specialized", facts) == "sm_100.json has no entry of specialized for this call"


def test_the_interpreter_and_unknown_hardware_follow_the_rule() -> None:
    assert tables.lookup("none", "fused", FACTS) == (LaunchConfig(16, 16, 4, 1), "rule: no table for none")
    assert tables.lookup("sm_80", "fused", FACTS)[1] == "rule: no table for sm_80"
    assert tables.lookup("sm_90", "fused", replace(FACTS, q_bits=32))[1] == "rule: sm_90.json has no entry of fused for this call"


@pytest.mark.parametrize(("arch", "shared"), [("sm_80", 101376), ("sm_90", 232448), ("sm_100", 232448), ("sm_120", 101376)])
def test_the_rule_for_fp32_fits_shared_memory(arch: str, shared: int) -> None:
    """Q, and of every stage a tile of K and of V, of four bytes an element; what the tables know has two at most."""
    for rows, dim, kernel in product((1, 64, 4096), (64, 128, 256), ("fused", "tree_suffix")):
        facts = replace(FACTS, rows=rows, head_dim=dim, v_head_dim=dim, q_bits=32, cache_bits=32)
        launch = tables.rule(arch, kernel, facts)
        assert 4 * dim * (launch.block_m + 2 * launch.num_stages * launch.block_n) <= shared, launch


def test_only_kernels_that_divide_have_parts_combined_by_a_launch() -> None:
    entry = (Entry((), LaunchConfig(16, 16, 4, 1, combine="launch")),)
    made = Table("sm_90", "3.8.0", "a test", {"fused": (), "tree_suffix": (), "specialized": entry})
    assert parse(render(made), "t.json") == made
    text = render(Table("sm_90", "3.8.0", "a test", {"fused": (), "tree_suffix": entry}))
    with pytest.raises(
        SpecverifyError, match=r"tree_suffix entry 0: launch.combine is 'launch'; .* for tree_suffix the first only"
    ):
        parse(text, "t.json")


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ArgumentError, match="kernel: got 'fusd'; allowed: fused or tree_suffix or specialized"):
        tables.lookup("sm_90", "fusd", FACTS)


def test_the_first_entry_whose_every_condition_holds_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parse(
        table(
            entry(when={"rows": [8, 16], "split": [True]}, launch=LAUNCH | {"block_n": 16}, measured=True),
            entry(when={"rows": [8, 16], "kind": ["chain", "branches"]}, launch=LAUNCH | {"block_n": 32}),
            entry(when={"page_size": [64, None]}, launch=LAUNCH | {"block_n": 128}),
            entry(when={}, launch=LAUNCH | {"block_n": 64}),
        ),
        "a test",
    )
    monkeypatch.setattr(tables, "read", lambda arch: made)
    tables.lookup.cache_clear()
    try:
        for facts, block_n, number in (
            (replace(FACTS, split=True), 16, 0),
            (replace(FACTS, rows=8), 32, 1),
            (replace(FACTS, rows=7), 64, 3),
            (replace(FACTS, rows=17), 64, 3),
            (replace(FACTS, kind="qlen_only"), 64, 3),
            (replace(FACTS, kind="qlen_only", page_size=64), 128, 2),
            (replace(FACTS, kind="qlen_only", page_size=63), 64, 3),
        ):
            launch, reason = tables.lookup("sm_90", "fused", facts)
            assert (launch.block_n, f"fused entry {number} " in reason) == (block_n, True)
        assert tables.lookup("sm_90", "fused", replace(FACTS, split=True))[1].endswith("(measured with Triton 3.8.0)")
        assert tables.lookup("sm_90", "fused", FACTS)[1].endswith("(not measured)")
    finally:
        tables.lookup.cache_clear()


def test_what_is_written_is_what_is_read() -> None:
    amd = LaunchConfig(32, 64, 4, 1, 2, (("waves_per_eu", 2), ("kpack", 1)))
    entries = (
        Entry((("rows", (1, None)), ("kind", ("chain",)), ("split", (True,))), amd, True, 48, "12 us against 14 us without"),
        Entry((), amd),
        Entry((), replace(amd, combine="launch")),
    )
    made = Table("gfx950", "3.8.0", 'a "note" − with more', {"fused": entries, "tree_suffix": ()})
    assert parse(render(made), "made") == made
    # A table that says nothing has the last program combine, and says nothing when it is written.
    assert render(made).count("combine") == 1
    assert parse(render(made, [{"candidate": 1, "microseconds": 2.5}]), "made") == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "t.json is not JSON"),
        ("[]", "t.json: got []; allowed: an object"),
        (table(schema=2), "t.json: schema is 2; allowed: 1"),
        (table(triton=3.8), "t.json: triton is 3.8; allowed: text"),
        (table(extra=1), "t.json: extra is 1; allowed: no such field"),
        (table(kernels={"fused": []}), "t.json, kernels: tree_suffix is None; allowed: a value"),
        (table(kernels={"fused": [], "tree_suffix": [], "fusd": []}), "t.json, kernels: fusd is []"),
        (table(kernels={"fused": {}, "tree_suffix": []}), "t.json: fused is {}; allowed: a list of entries"),
        (table(entry(), 3), "t.json, fused entry 1: got 3; allowed: an object"),  # type: ignore[arg-type]
        (table(entry(when={"row": [1, 2]})), "t.json, fused entry 0, when: row is [1, 2]; allowed: no such field"),
        (table(entry(when={"rows": 16})), "fused entry 0: when.rows is 16; allowed: [least, most]"),
        (table(entry(when={"rows": [16, 1]})), "when.rows is [16, 1]; allowed: 1 <= least <= most"),
        (table(entry(when={"rows": [0, 1]})), "when.rows is [0, 1]; allowed: 1 <= least <= most"),
        (table(entry(when={"rows": [1.0, 2]})), "when.rows is [1.0, 2]"),
        (table(entry(when={"rows": [True, 2]})), "when.rows is [True, 2]"),
        (table(entry(when={"split": [1]})), "when.split is [1]; allowed: a list of false, true"),
        (table(entry(when={"kind": []})), "when.kind is []; allowed: a list of"),
        (table(entry(when={"kind": ["tree"]})), "when.kind is ['tree']"),
        (table(entry(when={"cache_bits": [4]})), "when.cache_bits is [4]; allowed: a list of 8, 16, 32"),
        (table(entry(launch=LAUNCH | {"block_m": 48})), "launch.block_m is 48; allowed: 16, 32, 64, 128"),
        (table(entry(launch=LAUNCH | {"block_n": 8})), "launch.block_n is 8"),
        (table(entry(launch=LAUNCH | {"num_warps": 3})), "launch.num_warps is 3; allowed: 1, 2, 4, 8, 16"),
        (table(entry(launch=LAUNCH | {"num_warps": True})), "launch.num_warps is True"),
        (table(entry(launch=LAUNCH | {"num_stages": 7})), "launch.num_stages is 7"),
        (table(entry(launch=LAUNCH | {"ctas_per_sm": 0})), "launch.ctas_per_sm is 0"),
        (table(entry(launch=LAUNCH | {"combine": "first"})), "launch.combine is 'first'; allowed: 'last', 'launch'"),
        (table(entry(launch=LAUNCH | {"combine": ["launch"]})), "launch.combine is ['launch']"),
        (table(entry(launch=LAUNCH | {"num_ctas": 2})), "fused entry 0, launch: num_ctas is 2; allowed: no such field"),
        (table(entry(launch={"block_m": 16})), "fused entry 0, launch: block_n is None; allowed: a value"),
        (
            table(entry(launch=LAUNCH | {"amd": {"kpack": 1}})),
            "launch.amd is {'kpack': 1}; allowed: no options of AMD's compiler",
        ),
        (table(entry(launch=LAUNCH | {"amd": {"kpack": 3}}), arch="gfx950"), "launch.amd.kpack is 3; allowed: 1, 2"),
        (table(entry(launch=LAUNCH | {"amd": {"wave": 3}}), arch="gfx950"), "launch.amd: wave is 3; allowed: no such field"),
        (table(entry(measured=1)), "measured is 1; allowed: true or false"),
        (table(entry(spill_bytes=-4, spill_reason="x")), "spill_bytes is -4; allowed: 0 or more"),
        (table(entry(spill_bytes=8)), "spill_reason is ''; allowed: the measurement"),
        (table(entry(spill_reason="x")), "spill_reason is 'x'; allowed: the measurement"),
    ],
)
def test_a_damaged_table_names_file_entry_and_field(text: str, says: str) -> None:
    with pytest.raises(SpecverifyError, match=re.escape(says)):
        parse(text, "t.json")


def test_a_table_of_another_architecture_is_refused() -> None:
    with pytest.raises(SpecverifyError, match=re.escape("t.json: arch is 'sm_90'; allowed: 'sm_100'")):
        parse(table(), "t.json", "sm_100")
