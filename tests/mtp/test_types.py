"""`mtp_module_types` and the plan behind it, of every kind and of what no kind may be."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp import mtp_module_types
from sglang_specverify.mtp.config import CheckpointConfig
from sglang_specverify.mtp.decide import Built, read_plan
from sglang_specverify.mtp.headers import StoredTensor
from sglang_specverify.mtp.quark import excludes, layer_specs, spec_for, unservable
from sglang_specverify.mtp.witness import modules_of
from tests.mtp.checkpoints import Written, write
from tests.mtp.kinds import BROKEN, FP8_SPEC, KINDS, MXFP4_SPEC, OTHERS, Kind

LAYER = "mtp.layers.0."
EXPECTED = {
    "all bf16, listed": "all plain, routed experts",
    "all bf16, not listed": "all plain, routed experts",
    "mixed": "mixed, routed experts",
    "mixed, experts bf16": "mixed, routed experts",
    "all packed": "all quantised, routed experts",
    "dense, all bf16, by parent": "all plain, dense",
    "dense, mixed": "mixed, dense",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_kind(name: str, written: dict[str, Written]) -> None:
    assert read_plan(written[name].directory).kind == EXPECTED[name]


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_every_stored_module_has_the_type_that_was_written(name: str, written: dict[str, Written]) -> None:
    one = written[name]
    names = {tensor.removesuffix("_scale").removesuffix(".weight") for tensor in one.tensors}
    expected = {}
    for module in names - {"lm_head", "model.language_model.embed_tokens"}:
        tail = module.removeprefix(one.kind.layer)
        kinds = (("mxfp4", one.kind.packed), ("fp8", one.kind.fp8))
        expected[module] = next((kind for kind, prefixes in kinds if prefixes and tail.startswith(prefixes)), "bf16")
    assert mtp_module_types(one.directory) == expected
    assert mtp_module_types(str(one.directory)) == expected
    assert len(expected) >= 14


@pytest.mark.parametrize("name", BROKEN)
def test_a_contradictory_one_is_refused_with_its_tensors(name: str, written: dict[str, Written]) -> None:
    with pytest.raises(SpecverifyError) as error:
        mtp_module_types(written[name].directory)
    for said in BROKEN[name][1]:
        assert said in error.value.what
    assert error.value.remedy


def _changed(one: Written, tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with other tensors; None removes one."""
    shutil.copytree(one.directory, tmp_path / "copy", ignore=shutil.ignore_patterns("model*"))
    tensors = {name: changes.get(name, tensor) for name, tensor in one.tensors.items()} | changes
    write(tmp_path / "copy", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("module", "part", "tensor", "says"),
    [
        ("mlp.experts.1.up_proj", "weight_scale", None, "has no scale beside it"),
        ("mlp.experts.1.up_proj", "weight_scale", torch.zeros(32, 3, dtype=torch.uint8), r"needs a scale of shape \[32, 2\]"),
        ("mlp.experts.1.up_proj", "weight_scale", torch.zeros(32, 2), "of no known packing"),
        ("self_attn.o_proj", "weight_scale", torch.zeros(64, 2, dtype=torch.uint8), "is not quantised, and yet has the scale"),
        ("mlp.experts.3.down_proj", "weight", None, "mtp.layers.0.mlp.experts lacks 1 of 12 weights: .*3.down_proj.weight"),
    ],
)
def test_tensors_that_do_not_fit_together(
    module: str, part: str, tensor: torch.Tensor | None, says: str, written: dict[str, Written], tmp_path: Path
) -> None:
    name = f"{LAYER}{module}"
    directory = _changed(written["mixed"], tmp_path, **{f"{name}.{part}": tensor})
    with pytest.raises(SpecverifyError, match=says) as error:
        read_plan(directory)
    assert name in error.value.what


def test_gate_and_up_of_each_expert_in_one_tensor(written: dict[str, Written], tmp_path: Path) -> None:
    one = written["all bf16, listed"]
    changes: dict[str, torch.Tensor | None] = {}
    for expert in range(4):
        base = f"{LAYER}mlp.experts.{expert}."
        gate, up = (one.tensors[f"{base}{name}_proj.weight"] for name in ("gate", "up"))
        joined = torch.cat([gate, up])
        changes |= {f"{base}gate_proj.weight": None, f"{base}up_proj.weight": None, f"{base}gate_up_proj.weight": joined}
    with pytest.raises(SpecverifyError, match="gate and up of each expert in one tensor, which SGLang's loader does not divide"):
        read_plan(_changed(one, tmp_path, **changes))


def test_one_tensor_under_two_spellings(written: dict[str, Written], tmp_path: Path) -> None:
    one = written["mixed"]
    again = {"mtp.layers.4.self_attn.o_proj.weight": one.tensors[f"{LAYER}self_attn.o_proj.weight"]}
    with pytest.raises(
        SpecverifyError, match=r"mtp.layers.0.self_attn.o_proj.weight and mtp.layers.4.self_attn.o_proj.weight are both"
    ):
        mtp_module_types(_changed(one, tmp_path, **again))


@pytest.mark.parametrize("method", ["quark", None])
def test_a_model_without_mtp(method: str | None, tmp_path: Path) -> None:
    one = Written(Kind(method=method), tmp_path)
    write(tmp_path, {name: tensor for name, tensor in one.tensors.items() if not name.startswith("mtp.")})
    assert mtp_module_types(tmp_path) == {}
    assert read_plan(tmp_path).kind == "no MTP"


def test_contradictions_are_judged_for_quark_alone(written: dict[str, Written], tmp_path: Path) -> None:
    """Another method may know what it does; what its files hold is told all the same."""
    shutil.copytree(written["a few experts stored otherwise"].directory, tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config["quantization_config"]["quant_method"] = "another"
    path.write_text(json.dumps(config))
    types = mtp_module_types(tmp_path / "copy")
    assert types[f"{LAYER}mlp.experts.2.up_proj"] == "bf16" and types[f"{LAYER}mlp.experts.1.up_proj"] == "mxfp4"


@pytest.mark.parametrize(
    ("name", "module", "says"),
    [
        ("all bf16, not listed", "mlp.experts", "config.json says mxfp4 and does not exclude it; the files decide: bf16"),
        ("mixed, FP8 attention by channel, not said", "self_attn.qkv_proj", "config.json says mxfp4 .* the files decide: fp8"),
        ("all bf16, by parent", "mlp.experts", ""),
        ("mixed", "mlp.experts", ""),
        ("mixed", "self_attn.qkv_proj", ""),
    ],
)
def test_the_files_decide_and_the_difference_is_told(name: str, module: str, says: str, written: dict[str, Written]) -> None:
    (built,) = [built for built in read_plan(written[name].directory).built if built.name == f"{LAYER}{module}"]
    assert re.fullmatch(says, built.note)


def test_an_exclude_that_the_files_contradict(tmp_path: Path) -> None:
    notes = {built.name: built.note for built in read_plan(Written(Kind(("mlp.experts",), ("mtp.*",)), tmp_path).directory).built}
    assert notes[f"{LAYER}mlp.experts"] == "config.json excludes it ('mtp.*'); the files decide: mxfp4"
    assert notes[f"{LAYER}self_attn.qkv_proj"] == ""
    half = Written(Kind(("mlp.experts",), ("mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.shared_expert")), tmp_path / "half")
    notes = {built.name: built.note for built in read_plan(half.directory).built}
    assert notes[f"{LAYER}self_attn.qkv_proj"].startswith(f"config.json does not exclude {LAYER}self_attn.k_proj, ")


Shape = tuple[str, tuple[int, ...]]


def _stored(weight: Shape, scale: Shape | None, **more: Shape) -> Built:
    """One module of these tensors."""
    tensors = {"weight": weight, **({"weight_scale": scale} if scale else {}), **more}
    name = f"{LAYER}self_attn.o_proj"
    table = {f"{name}.{part}": StoredTensor(f"{name}.{part}", *found, "f") for part, found in tensors.items()}
    (module,) = modules_of(table, 4)
    return Built(name, module.type, (module,))


WEIGHT = ("F8_E4M3", (256, 512))


@pytest.mark.parametrize(
    ("weight", "scale", "kind", "granularity"),
    [
        (("BF16", (4, 4)), None, "bf16", ""),
        (("F16", (4, 4)), None, "fp16", ""),
        (("F32", (4, 4)), None, "fp32", ""),
        (("U8", (4, 32)), ("U8", (4, 2)), "mxfp4", "per_group"),
        (("U8", (4, 32)), ("F8_E8M0", (4, 2)), "mxfp4", "per_group"),
        (("U8", (4, 32)), ("F8_E4M3", (4, 4)), "nvfp4", "per_group"),
        (WEIGHT, ("F32", ()), "fp8", "per_tensor"),
        (WEIGHT, ("F32", (1,)), "fp8", "per_tensor"),
        (WEIGHT, ("F32", (256,)), "fp8", "per_channel"),
        (WEIGHT, ("BF16", (256, 1)), "fp8", "per_channel"),
        (WEIGHT, ("F32", (2, 4)), "fp8", "per_block"),
        (WEIGHT, ("U8", (256, 16)), "mxfp8", "per_group"),
        (("I8", (4, 4)), ("F32", (4,)), "int8", ""),
    ],
)
def test_types_by_dtype_and_scale(weight: Any, scale: Any, kind: str, granularity: str) -> None:
    module = _stored(weight, scale).stored[0]
    assert (module.type, module.granularity, module.problem) == (kind, granularity, "")


def test_specs_that_are_made_where_none_fits() -> None:
    """The configuration's own spec is taken only if the tensors are what it describes."""
    said = CheckpointConfig(quant={"quant_method": "quark", "global_quant_config": MXFP4_SPEC})
    packed = _stored(("U8", (4, 32)), ("U8", (4, 2)))
    assert spec_for(packed, said) is MXFP4_SPEC
    assert spec_for(packed, CheckpointConfig()) == MXFP4_SPEC
    assert spec_for(_stored(WEIGHT, ("F32", ())), said) == FP8_SPEC
    static = spec_for(_stored(WEIGHT, ("F32", ()), input_scale=("F32", ())), said)
    assert static["input_tensors"] == {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    channel = spec_for(_stored(WEIGHT, ("F32", (256,))), said)
    assert (channel["weight"]["qscheme"], channel["input_tensors"]["qscheme"]) == ("per_channel", "per_channel")
    block = spec_for(_stored(WEIGHT, ("F32", (2, 4))), said)
    assert (block["weight"]["qscheme"], block["weight"]["block_size"]) == ("per_block", [128, 128])
    # With a single block the shapes could mean one scale for all; a spec that says blocks is believed.
    small = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [256, 512]}}
    assert spec_for(_stored(WEIGHT, ("F32", (1, 1))), CheckpointConfig(quant={"global_quant_config": small})) is small
    with pytest.raises(SpecverifyError, match="stored as int8, for which SGLang's Quark code has no scheme"):
        spec_for(_stored(("I8", (4, 4)), ("F32", (4,))), said)


def test_what_the_hook_hands_on(written: dict[str, Written]) -> None:
    plan = read_plan(written["mixed"].directory)
    assert unservable(plan) == ""
    # As patterns: SGLang takes a plain `mtp.…mlp.experts` for the word that all of the MTP part is unquantised.
    assert not [entry for entry in excludes(plan) if not entry.startswith("re:")]
    assert r"re:mtp\.layers\.0\.self_attn\.qkv_proj$" in excludes(plan)
    specs = layer_specs(plan)
    assert specs[f"{LAYER}mlp.experts"] == MXFP4_SPEC and f"{LAYER}self_attn.q_proj" not in specs
    assert specs["model.layers.0.mlp.shared_expert.up_proj"] == {} != specs["model.layers.0.mlp.experts"]
