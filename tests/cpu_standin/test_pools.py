"""Slots and accepted tokens against loops over single cells."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.arange(1000, 1000 + 5 * 40, dtype=torch.int32).view(5, 40)


START, END = torch.tensor([3, 7, 0], dtype=torch.int32), torch.tensor([6, 7, 5], dtype=torch.int32)
POOL = torch.tensor([4, 0, 2])


def test_slots_enter_the_rows(kernels: ModuleType, rows: torch.Tensor) -> None:
    slots = torch.arange(10, 18)
    wanted = rows.clone()
    it = iter(slots.tolist())
    for row, start, end in zip(POOL.tolist(), START.tolist(), END.tolist(), strict=True):
        for column in range(start, end):
            wanted[row, column] = next(it)
    kernels.assign_req_to_token_pool_cpu(POOL, rows, START, END, slots, rows.shape[1])
    assert torch.equal(rows, wanted)


def test_slots_leave_the_rows(kernels: ModuleType, rows: torch.Tensor) -> None:
    out = torch.full((10,), -7)
    kernels.assign_extend_cache_locs_cpu(POOL, rows, START, END, out, rows.shape[1])
    wanted = [int(rows[r, c]) for r, s, e in zip(POOL, START, END, strict=True) for c in range(int(s), int(e))]
    assert out.tolist() == [*wanted, -7, -7]


def test_draft_slots_follow_the_prefix(kernels: ModuleType, rows: torch.Tensor) -> None:
    out = torch.empty(3 * 6, dtype=torch.int64)
    lengths = torch.tensor([5, 9, 1])
    kernels.assign_draft_cache_locs_contiguous_cpu(POOL, rows, lengths, out, rows.shape[1], 2, 3)
    wanted = [int(rows[r, int(n) + i]) for r, n in zip(POOL, lengths, strict=True) for i in range(6)]
    assert out.tolist() == wanted


def test_nothing_to_do_is_fine(kernels: ModuleType, rows: torch.Tensor) -> None:
    before, none = rows.clone(), torch.empty(0, dtype=torch.int64)
    kernels.assign_req_to_token_pool_cpu(none, rows, none, none, none, rows.shape[1])
    kernels.copy_all_layer_kv_cache_cpu(none, none, none, none)
    kernels.fill_accept_out_cache_loc_cpu(torch.full((2, 3), -1), torch.arange(6), none)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_moves_read_before_they_write(kernels: ModuleType, dtype: torch.dtype) -> None:
    buffers = [torch.arange(12 * width, dtype=torch.float32).view(12, width).to(dtype) for width in (4, 6)]
    wanted = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([3, 4, 9]), torch.tensor([4, 3, 1])  # a swap, and one more
    for buffer, want in zip(buffers, wanted, strict=True):
        for t, s in zip(target.tolist(), source.tolist(), strict=True):
            want[t] = buffer[s]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    strides = torch.tensor([buffer[0].numel() * buffer.element_size() for buffer in buffers])
    kernels.copy_all_layer_kv_cache_cpu(addresses, strides, target, source)
    for buffer, want in zip(buffers, wanted, strict=True):
        assert torch.equal(buffer, want)


def test_last_accepted_token(kernels: ModuleType) -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    out = torch.zeros(2, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 3]), out, 3)
    assert out.tolist() == [5, 10]


def test_accepted_slots_are_packed(kernels: ModuleType) -> None:
    out = torch.full((6,), -1)
    kernels.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.arange(100, 106), out)
    assert out.tolist() == [100, 102, 103, -1, -1, -1]


@pytest.mark.parametrize("select", [None, [1, 3]])
def test_ids_rotate(kernels: ModuleType, select: list[int] | None) -> None:
    ids = torch.tensor([1, 2, 3, 4, 5])
    chosen = None if select is None else torch.tensor(select)
    kernels.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[70], [80]]), chosen)
    # Shifted: 2 3 _ | 5 _ ; the new token goes to the end, or where it is told to.
    assert ids.tolist() == ([2, 3, 70, 5, 80] if select is None else [2, 70, 3, 80, 5])
