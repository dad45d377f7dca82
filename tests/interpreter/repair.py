"""Repairs of Triton's CPU interpreter, without which it computes other numbers than a GPU does.

| what it does | seen in Triton | here |
|---|---|---|
| `tl.dot` on bf16 multiplies the 16-bit patterns as integers | 3.7.1, 3.8.0, 3.9.0 | operands become FP32 before the product |
| FP32 to bf16 truncates instead of rounding to nearest even | 3.7.1, 3.8.0, 3.9.0 | PyTorch rounds |
| FP32 or FP16 to FP8 rounds ties up and loses the carry into the exponent | 3.7.1, 3.8.0, 3.9.0 | PyTorch rounds, saturating |
| FP8 to wider types knows no NaN or infinity | 3.7.1, 3.8.0, 3.9.0 | PyTorch converts |

`test_repair.py` has a test for each that fails without the repair, and one that fails once Triton needs it no more: then
that row and its code go. Elementwise arithmetic on bf16 is as wrong and is not repaired: kernels do it in FP32.

It is also slow: each call of a function inside a kernel, `tl.sum` among them, looks through all of `triton.language` for
what to replace, and each integer operation is done twice for an overflow check that only debug mode looks at (seen in
3.8.0). Here the first happens once a launch and the second not at all, and kernels run in less than half the time.

Needs TRITON_INTERPRET=1 in the environment before triton is imported; imports nothing but numpy, torch and triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}

_original_convert: Callable[..., Any] = interpreter._convert_float
_original_dot: Callable[..., Any] = interpreter.InterpreterBuilder.create_dot
_original_patch: Callable[[Any], Any] = interpreter._patch_lang

_original_options: Any = interpreter.interpreter_builder.options

#: Modules of `triton.language` in which the interpreter's functions stand now.
_patched: set[Any] = set()


def _convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """Bits of `data`, which holds values or bits of type `source`, in type `target`."""
    toward_zero = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
    if toward_zero or source not in _TORCH or target not in _TORCH:
        return _original_convert(data, source, target, rounding_mode)
    values = torch.from_numpy(np.frombuffer(data.tobytes(), np.uint8).copy()).view(_TORCH[source])
    if target.primitive_bitwidth == 8 and source.primitive_bitwidth > 8:
        # The GPU's conversion saturates, PyTorch's gives NaN or infinity; clamping lets NaN pass.
        limit = torch.finfo(_TORCH[target]).max
        values = values.to(torch.float64).clamp(-limit, limit).to(values.dtype)
    bits = values.to(_TORCH[target]).view(torch.uint8).numpy()
    return bits.view(_UNSIGNED[target.primitive_bitwidth]).reshape(data.shape)


def _operand(handle: Any) -> np.ndarray:
    kind = handle.dtype.scalar
    if kind == tl.bfloat16 or (kind.primitive_bitwidth == 8 and kind.is_floating()):
        return _convert(handle.data, kind, tl.float32, None).view(np.float32)
    return handle.data


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product = np.matmul(_operand(a), _operand(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


class _Nothing:
    """The scope of a call that replaced nothing."""

    def restore(self) -> None:
        pass


def _patch_once(fn: Any) -> Any:
    """`_patch_lang` for a function that is called inside a launch, where the same modules were dealt with before."""
    langs = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
    if langs <= _patched:
        return _Nothing()
    scope = _original_patch(fn)
    new = langs - _patched
    _patched.update(new)
    restore = scope.restore

    def restore_all() -> None:
        restore()
        _patched.difference_update(new)

    scope.restore = restore_all
    return scope


def apply() -> None:
    """Put the repairs in; doing it again changes nothing."""
    interpreter._patch_lang = _patch_once
    interpreter.interpreter_builder.options = dataclasses.replace(_original_options, sanitize_overflow=False)
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot


def remove() -> None:
    """Take them out again."""
    interpreter._patch_lang = _original_patch
    interpreter.interpreter_builder.options = _original_options
    interpreter._convert_float = _original_convert
    interpreter.InterpreterBuilder.create_dot = _original_dot


@contextmanager
def suspended() -> Iterator[None]:
    """The interpreter as Triton ships it."""
    remove()
    try:
        yield
    finally:
        apply()
