"""The witness: files written by the safetensors library, and by nobody in his right mind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp.headers import INDEX, StoredTensor, read_header, stored_tensors

TENSORS = {
    "a.weight": torch.zeros(3, 4, dtype=torch.bfloat16),
    "b": torch.zeros(2, 2, 8, dtype=torch.uint8),
    "c.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
    "c.weight_scale": torch.tensor(1.0),
    "empty": torch.zeros(0, 5),
}


def _file(directory: Path, name: str = "model.safetensors", **tensors: torch.Tensor) -> Path:
    save_file({name: tensor.clone() for name, tensor in (tensors or TENSORS).items()}, directory / name, {"format": "pt"})
    return directory / name


def _any(name: str) -> bool:
    return True


def test_names_types_and_shapes(tmp_path: Path) -> None:
    assert read_header(_file(tmp_path)) == {
        name: StoredTensor(name, dtype, shape, "model.safetensors")
        for name, dtype, shape in (
            ("a.weight", "BF16", (3, 4)),
            ("b", "U8", (2, 2, 8)),
            ("c.weight", "F8_E4M3", (4, 4)),
            ("c.weight_scale", "F32", ()),
            ("empty", "F32", (0, 5)),
        )
    }


def _cut(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at]


def _header(text: bytes) -> Callable[[bytes], bytes]:
    return lambda data: len(text).to_bytes(8, "little") + text


NO_SIZE = (b"-1", b"1.0", b"true", b"Infinity", b'"1"', b"null")
NO_SIZES = (b"1", b'"12"', b"{}", *(b"[%s]" % size for size in NO_SIZE))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_cut(0), "its 0 bytes do not hold the header"),
        (_cut(7), "its 7 bytes do not hold"),
        (_cut(30), "its 30 bytes do not hold"),
        (_cut(-1), "bytes of data, and its header says"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "do not hold the header"),
        (lambda data: data[:8] + b"\xff" + data[9:], "its header is not what safetensors writes"),
        (_header(b"[1, 2]"), "its header is not what safetensors writes"),
        (_header(b'{"a": {"dtype": "BF16", "shape": [1]}}'), "its header is not what"),
        (_header(b'{"a": {"dtype": 3, "shape": [1], "data_offsets": [0, 0]}}'), "its header is not what"),
        *(
            (_header(b'{"a": {"dtype": "BF16", "shape": %s, "data_offsets": [0, 0]}}' % shape), "its header is not what")
            for shape in NO_SIZES
        ),
        *(
            (_header(b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, %s]}}' % end), "its header is not what")
            for end in NO_SIZE
        ),
    ],
)
def test_a_damaged_file_is_named(damage: Callable[[bytes], bytes], says: str, tmp_path: Path) -> None:
    file = _file(tmp_path)
    whole = read_header(file)
    file.write_bytes(damage(file.read_bytes()))
    assert whole
    with pytest.raises(SpecverifyError, match="model.safetensors is not a whole safetensors file: .*" + says):
        read_header(file)


def _index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_with_an_index_the_files_that_it_names(tmp_path: Path) -> None:
    one = torch.zeros(1)
    _file(tmp_path, "x.safetensors", a=one, b=one)
    _file(tmp_path, "y.safetensors", c=one)
    _file(tmp_path, "stale.safetensors", a=torch.zeros(9))
    # Not in the index but in a file that is: SGLang loads it too.
    _index(tmp_path, {"a": "x.safetensors", "c": "y.safetensors"})
    found = stored_tensors(tmp_path, _any)
    assert {name: tensor.file for name, tensor in found.items()} == {
        "a": "x.safetensors",
        "b": "x.safetensors",
        "c": "y.safetensors",
    }
    assert list(stored_tensors(tmp_path, lambda name: name == "c")) == ["c"]


def test_without_an_index_all_files(tmp_path: Path) -> None:
    _file(tmp_path, "x.safetensors", a=torch.zeros(1))
    _file(tmp_path, "y.safetensors", b=torch.zeros(1))
    (tmp_path / "z.bin").write_text("not one of them")
    assert list(stored_tensors(tmp_path, _any)) == ["a", "b"]


def test_consolidated_beside_model_is_left_out(tmp_path: Path) -> None:
    _file(tmp_path, "consolidated.safetensors", a=torch.zeros(1))
    _file(tmp_path, "model.safetensors", b=torch.zeros(1))
    assert list(stored_tensors(tmp_path, _any)) == ["b"]


def test_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(SpecverifyError, match="has no safetensors file"):
        stored_tensors(tmp_path, _any)
    with pytest.raises(SpecverifyError, match="nowhere cannot be read as a directory"):
        stored_tensors(tmp_path / "nowhere", _any)
    _file(tmp_path, "x.safetensors", a=torch.zeros(1))
    _index(tmp_path, {"a": "x.safetensors", "b": "lost.safetensors"})
    with pytest.raises(SpecverifyError, match=r"names files that are not there: lost\.safetensors"):
        stored_tensors(tmp_path, _any)
    _index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(SpecverifyError, match=r"says that x\.safetensors holds b, which no file holds"):
        stored_tensors(tmp_path, _any)
    assert list(stored_tensors(tmp_path, lambda name: name == "a")) == ["a"]
    for wrong in ("{", "[]", '{"weight_map": [1]}', "{}"):
        (tmp_path / INDEX).write_text(wrong)
        with pytest.raises(SpecverifyError, match="is no index"):
            stored_tensors(tmp_path, _any)


def test_two_files_that_disagree(tmp_path: Path) -> None:
    _file(tmp_path, "x.safetensors", a=torch.zeros(1), b=torch.zeros(2))
    _file(tmp_path, "y.safetensors", a=torch.zeros(1))
    assert set(stored_tensors(tmp_path, _any)) == {"a", "b"}
    _file(tmp_path, "y.safetensors", a=torch.zeros(1).bfloat16())
    with pytest.raises(
        SpecverifyError, match=r"two files hold a: a \(F32 \[1\], x.safetensors\) and a \(BF16 \[1\], y.safetensors\)"
    ):
        stored_tensors(tmp_path, _any)


def test_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _file(tmp_path)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Not by the file's mode, which root may ignore.
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(SpecverifyError, match=r"model\.safetensors cannot be read: Permission denied"):
        read_header(file)
