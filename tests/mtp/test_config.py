"""What config.json may hold where it is read, and what is said of anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp.config import read_config

#: Values of another type: than an object, a string, a whole number, a list of strings.
_NO_OBJECT, _NO_STRING, _NO_NUMBER = (5, "x", True, [], [{}]), (5, True, ["x"], {}), ("4", True, 4.0, [4], {})
_NO_STRINGS = (5, 0, "x", "", True, {}, {"x": 1}, [1], ["x", None], [["x"]])
_QUARK, _GLOBAL = "quantization_config.", "quantization_config.global_quant_config."
_LAYER = "quantization_config.layer_quant_config.*mlp*."
#: Every key that is read -> such values, and what is allowed.
_WRONG: dict[str, tuple[Sequence[Any], str]] = {
    "architectures": (_NO_STRINGS, "a list of strings"),
    "text_config": (_NO_OBJECT, "an object"),
    "num_hidden_layers": (_NO_NUMBER, "a whole number"),
    "text_config.num_hidden_layers": (_NO_NUMBER, "a whole number"),
    **{
        f"text_config.{name}": (("4", True, 4.0, ["4"], {}), "a whole number, or a list of them")
        for name in ("mtp_num_experts", "num_experts", "num_local_experts")
    },
    "quantization_config": (_NO_OBJECT, "an object"),
    "text_config.quantization_config": (_NO_OBJECT, "an object"),
    "compression_config": (_NO_OBJECT, "an object"),
    f"{_QUARK}quant_method": (_NO_STRING, "a string"),
    f"{_QUARK}exclude": (_NO_STRINGS, "a list of strings"),
    f"{_QUARK}layer_quant_config": (_NO_OBJECT, "an object"),
    f"{_QUARK}global_quant_config": (_NO_OBJECT, "an object"),
    _LAYER[:-1]: (_NO_OBJECT, "an object"),
    **{
        f"{spec}{key}": (wrong, allowed)
        for spec in (_GLOBAL, _LAYER)
        for key, wrong, allowed in (
            ("weight", (5, "x", True), "an object or a list"),
            ("weight.dtype", _NO_STRING, "a string"),
            ("weight.qscheme", _NO_STRING, "a string"),
            ("weight.group_size", _NO_NUMBER, "a whole number"),
            ("weight.block_size", (128, "x", ["128"], [0], [True], [128, None], {}), "a list of whole numbers from 1"),
        )
    },
}


def _with(key: str, value: object, quant_method: str = "quark") -> dict[str, Any]:
    """A configuration with `value` at `key`."""
    config: dict[str, Any] = {}
    if key.startswith(_QUARK):
        config["quantization_config"] = {"quant_method": quant_method}
    *parents, last = re.findall(r"\*mlp\*|\w+", key)
    inner = config
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return config


@pytest.mark.parametrize("key", _WRONG)
def test_a_value_of_another_type_is_named(key: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    values, allowed = _WRONG[key]
    for value in values:
        path.write_text(json.dumps(_with(key, value)))
        with pytest.raises(SpecverifyError) as caught:
            read_config(tmp_path)
        assert caught.value.what == f"{path}: {key} is {value!r}; allowed: {allowed}"
        assert caught.value.remedy
    # Null is as good as nothing.
    path.write_text(json.dumps(_with(key, None)))
    read_config(tmp_path)


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": "x" * 1000}))
    with pytest.raises(SpecverifyError, match=r"architectures is 'x{76}\.\.\.; allowed: a list of strings"):
        read_config(tmp_path)


@pytest.mark.parametrize("key", [key for key in _WRONG if key.startswith(_QUARK) and not key.endswith("quant_method")])
def test_other_methods_may_mean_other_things_by_the_same_keys(key: str, tmp_path: Path) -> None:
    for value in _WRONG[key][0]:
        (tmp_path / "config.json").write_text(json.dumps(_with(key, value, "another")))
        assert read_config(tmp_path).excludes.entries == ()


def test_experts_by_layer_are_not_counted(tmp_path: Path) -> None:
    """Models of other kinds have them; which the MTP layer's are, a list does not say."""
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": [16, 16]}))
    assert read_config(tmp_path).num_experts == 0
