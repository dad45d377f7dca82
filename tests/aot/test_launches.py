"""How a launch becomes what the compiler gets, and how results are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_specverify.kernels.aot import Cache, Compiled
from tests.aot import workers

There = Callable[..., Any]
COMPILED = Compiled("k", "sm_90", 168, 0, 0, 0, 65536, {"wgmma.mma_async": 4}, ("careful",), 1.0)
ALIGNED = ["tt.divisibility", 16]


@pytest.mark.parametrize(
    ("dtype", "type_"),
    [
        ("bfloat16", "*bf16"),
        ("float16", "*fp16"),
        ("float32", "*fp32"),
        ("float8_e4m3fn", "*fp8e4nv"),
        ("float8_e5m2", "*fp8e5"),
        ("float8_e4m3fnuz", "*fp8e4b8"),
        ("uint8", "*u8"),
        ("bool", "*u1"),
        ("int32", "*i32"),
        ("int64", "*i64"),
    ],
)
def test_a_tensor_is_a_pointer_of_its_type(there: There, dtype: str, type_: str) -> None:
    assert there(workers.specialised, "sm_90", "b", (dtype, 64, 0)) == (type_, None, [ALIGNED])


def test_alignment_is_what_the_view_has(there: There) -> None:
    assert there(workers.specialised, "sm_90", "b", ("bfloat16", 64, 8))[2] == [ALIGNED]
    assert there(workers.specialised, "sm_90", "b", ("bfloat16", 64, 4))[2] == []


@pytest.mark.parametrize(
    ("value", "type_", "constant", "attributes"),
    [
        (1, "constexpr", 1, []),
        (16, "i32", None, [ALIGNED]),
        (17, "i32", None, []),
        (2**31, "i64", None, [ALIGNED]),
        (-1, "i32", None, []),
        (1.0, "fp32", None, []),
        (None, "constexpr", None, []),
    ],
)
def test_a_number_is_specialised_as_in_a_call(
    there: There, value: object, type_: str, constant: object, attributes: object
) -> None:
    assert there(workers.specialised, "sm_90", "unused", value) == (type_, constant, attributes)


def test_on_amd_a_tensor_over_two_gigabytes_is_another_kernel(there: There) -> None:
    small = there(workers.specialised, "gfx950", "b", ("bfloat16", 1 << 20, 0))
    large = there(workers.specialised, "gfx950", "b", ("bfloat16", 1 << 31, 0))
    assert (small[2], large[2]) == ([ALIGNED, ["tt.pointer_range", 32]], [ALIGNED])


def test_a_result_is_kept_for_the_same_launch_only(there: There, tmp_path: Path) -> None:
    path = tmp_path / "new" / "compiled.jsonl"
    launches: list[dict[str, Any]] = [{}, {}, {"block": 32}, {"num_stages": 2}, {"block": 32}]
    results = there(workers.compiled_through, path, *launches)
    assert [result.cached for result in results] == [False, True, False, False, True]
    assert results[0].registers == results[1].registers
    assert results[0].shared_bytes != results[2].shared_bytes
    assert len(path.read_text().splitlines()) == 3


def test_the_cache_gives_back_what_was_put(tmp_path: Path) -> None:
    path = tmp_path / "compiled.jsonl"
    Cache(path).put("one", COMPILED)
    read = Cache(path).get("one")
    assert read is not None
    assert (read.cached, read.warnings, read.matrix_instructions) == (True, ("careful",), {"wgmma.mma_async": 4})
    assert Cache(path).get("two") is None


def test_an_unfinished_line_is_a_result_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "compiled.jsonl"
    cache = Cache(path)
    cache.put("one", COMPILED)
    whole = path.read_text()
    path.write_text(whole + whole.replace("one", "two")[:40] + "\n[]\n" + '{"key": "three"}\n' + whole.replace("one", "four"))
    read = Cache(path)
    assert [read.get(key) is not None for key in ("one", "two", "three", "four")] == [True, False, False, True]
