"""Rows of `tests.gpu.dsv4_seam` without a GPU: right with the kernel in the interpreter, and failed by a wrong result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_specverify.backends import dsv4 as backend
from sglang_specverify.upstream import has_dsv4_seam, installed_version
from tests.backends import dsv4
from tests.gpu import dsv4_rows, dsv4_steps
from tests.gpu.sparse_mla_calls import Checker
from tests.interpreter import repair


@pytest.fixture(autouse=True)
def kernels(no_flags: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not has_dsv4_seam(installed_version()):
        pytest.skip("this SGLang's dsv4 backend imports FlashMLA's function at each call")
    dsv4.stand_in(monkeypatch, lambda **_: pytest.fail("FlashMLA was called"))
    for name, value in (("SPARSE_MLA", "1"), ("KERNELS", "triton")):
        monkeypatch.setenv(f"SGLANG_SPECVERIFY_{name}", value)
    repair.apply()
    with dsv4.published():
        yield
    repair.remove()


def test_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages far apart; the same with outputs that are not the kernel's."""
    c = Checker("cpu", "bf16")
    with c.watching():
        dsv4_rows.far_pages(c)
    assert (c.problems, c.checks, c.missing_kernel()) == ([], 2, None)

    def wrong(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(call["q"]), torch.zeros(call["q"].shape[:3])

    monkeypatch.setattr(backend, "deepseek_v41_decode", wrong)
    other = Checker("cpu", "bf16")
    with other.watching():
        dsv4_rows.far_pages(other)
    assert len(other.problems) >= 4 and other.missing_kernel() is not None


def test_what_needs_a_gpu_says_so() -> None:
    for name in dsv4_rows.WRITERS:
        with pytest.raises(dsv4_rows.NotHere):
            dsv4_rows.ROWS[name](Checker("cpu", "bf16"))


def test_windows_of_a_chain_overlap() -> None:
    """As SGLang expands a verify: six rows a request, each a slot further than the one before."""
    lists = dsv4_steps.lists_of(13, 64, 3, 0.0, chain=True)
    swa = lists["swa"]
    assert all(torch.equal(swa[row, 1:], swa[row + 1, :-1]) == (row % 6 != 5) for row in range(12))
    assert bool((lists["swa_lens"] == dsv4_steps.WINDOW).all())
    some = dsv4_steps.lists_of(50, 64, 3, 1.0)
    assert bool((some["swa"][:, 0] >= 0).all()) and {*some["swa"][:, 1:].unique().tolist()} == {-1, dsv4_steps.BEYOND}
    assert int(some["swa_lens"].min()) >= 1 and int(some["extra_lens"].max()) <= 64
