"""What the safetensors files of a checkpoint hold, read from their headers: names, types and shapes, and no weight.

A file begins with eight bytes, the little-endian length of a JSON object that follows; that object gives each tensor its `dtype`,
`shape` and `data_offsets` (https://huggingface.co/docs/safetensors). Reading it needs neither the library nor SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_specverify.errors import SpecverifyError

INDEX = "model.safetensors.index.json"

#: The safetensors library refuses longer headers; a longer one is no header.
_LONGEST = 100_000_000
_REMEDY = "fetch the file again, or remove it if it does not belong to the checkpoint"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: `dtype` as safetensors spells it ("BF16", "U8", "F8_E4M3"), and the file's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def what(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)}, {self.file})"


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name -> tensor for one file.

    Raises:
        SpecverifyError: the file cannot be read, is no safetensors file, or is shorter than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8 or length > _LONGEST:
                raise _broken(path, f"its {size} bytes do not hold the header that it begins with")
            text = file.read(length)
    except OSError as error:
        raise SpecverifyError(f"{path} cannot be read: {error.strerror or error}", "check the file's permissions") from None
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _tensor(name, entry, path.name) for name, entry in entries.items()}
        end = max((_sizes(entry["data_offsets"])[1] for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise _broken(path, "its header is not what safetensors writes") from None
    if end > size - 8 - length:
        raise _broken(path, f"it has {size - 8 - length} bytes of data, and its header says {end}")
    return tensors


def _tensor(name: str, entry: Mapping[str, Any], file: str) -> StoredTensor:
    dtype = entry["dtype"]
    if not isinstance(dtype, str):
        raise TypeError(dtype)
    return StoredTensor(name, dtype, _sizes(entry["shape"]), file)


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise TypeError(value)
    return tuple(value)


def _broken(path: Path, why: str) -> SpecverifyError:
    return SpecverifyError(f"{path} is not a whole safetensors file: {why}", _REMEDY)


def read_index(directory: Path) -> dict[str, str] | None:
    """Tensor -> file from the checkpoint's index; None where it has none.

    Raises:
        SpecverifyError: the index is unreadable or names a file that is not there.
    """
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): str(file) for name, file in weight_map.items()}
    except OSError as error:
        raise SpecverifyError(f"{path} cannot be read: {error.strerror or error}", "check the file's permissions") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise SpecverifyError(f"{path} is no index: it has no object weight_map", "fetch the file again") from None
    absent = sorted({file for file in found.values() if not (directory / file).is_file()})
    if absent:
        more = f" and {len(absent) - 4} more" if len(absent) > 4 else ""
        what = f"{path} names files that are not there: {', '.join(absent[:4])}{more}"
        raise SpecverifyError(what, "fetch the rest of the checkpoint")
    return found


def stored_tensors(directory: Path, wanted: Callable[[str], bool]) -> dict[str, StoredTensor]:
    """The wanted tensors among those that SGLang's loader would read from `directory`.

    With an index it reads the files that the index names, all that is in them; without one every `*.safetensors`, except that
    `consolidated.safetensors` beside `model.safetensors` is left out.

    Raises:
        SpecverifyError: no such directory, no safetensors file, a broken file or index, or two files that disagree on a tensor.
    """
    try:
        files = sorted(entry.name for entry in directory.iterdir() if entry.name.endswith(".safetensors"))
    except OSError as error:
        raise SpecverifyError(
            f"{directory} cannot be read as a directory: {error.strerror or error}", "name the directory of a checkpoint"
        ) from None
    index = read_index(directory)
    if index is not None:
        files = sorted(set(index.values()))
    elif files == ["consolidated.safetensors", "model.safetensors"]:
        files = files[1:]
    if not files:
        raise SpecverifyError(f"{directory} has no safetensors file", "name a directory that holds a checkpoint's weights")
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(directory / file).items():
            if not wanted(name):
                continue
            other = found.setdefault(name, tensor)
            if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
                raise SpecverifyError(f"two files hold {name}: {other.what} and {tensor.what}", "remove the file that is stale")
    for name, file in (index or {}).items():
        if wanted(name) and name not in found:
            raise SpecverifyError(f"{directory / INDEX} says that {file} holds {name}, which no file holds", _REMEDY)
    return found
