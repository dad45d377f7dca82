"""Every kind of checkpoint, loaded by SGLang's own loader with the hook: each module has its file's type and values."""

from __future__ import annotations

import pytest
import torch

from sglang_specverify.mtp import mtp_module_types
from tests.mtp.checkpoints import Written
from tests.mtp.conftest import Load, Loaded
from tests.mtp.kinds import BROKEN, KINDS, OTHERS
from tests.mtp.parameters import value_of

#: What SGLang 0.5.22 and 0.5.23 do by themselves: an error while they load,
RAISES = {
    "all bf16, not listed",
    "all bf16, by parent",
    "all bf16, by parent without glob",
    "all bf16, by two globs",
    "mixed, listed by absolute index",
    "mixed, experts bf16",
    "mixed, FP8 attention by channel, not said",
    "mixed, in all three types and one tensor a fused module",
    "mixed, experts in two tensors with endings",
    "bf16 experts in two tensors",
    "dense, all bf16, by parent",
}
#: or parameters that no tensor reached, in silence, of which these are some. All other kinds they load right.
_UNREACHED = {"self_attn.q_proj", "mlp.experts.0.up_proj", "input_layernorm"}
SILENT = {
    "mixed, FP8 attention by block": {f"self_attn.{name}_proj" for name in "qkvo"},
    "stored by absolute index": _UNREACHED,
    "stored under the language model": _UNREACHED,
}


def _wrong(one: Written, load: Load) -> list[str]:
    """Modules that have another type or other values in the model than in the file."""
    assert set(one.values) >= {"mtp.fc", "self_attn.o_proj", "mtp.norm"}
    found = []
    for module, value in one.values.items():
        kind, got = value_of(module, load.parameters)
        packed, fp8 = (prefixes and module.startswith(prefixes) for prefixes in (one.kind.packed, one.kind.fp8))
        if kind != ("mxfp4" if packed else "fp8" if fp8 else "bf16") or not torch.equal(got, value):
            found.append(module)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_loads_what_was_written(name: str, written: dict[str, Written], loaded: dict[str, Loaded]) -> None:
    load = loaded[name].hooked
    assert load.error is None
    assert _wrong(written[name], load) == []
    assert load.read == len(written[name].tensors)


@pytest.mark.parametrize("name", KINDS)
def test_what_sglang_does_by_itself(name: str, written: dict[str, Written], loaded: dict[str, Loaded]) -> None:
    """Where it is right, the hook changes no parameter's name, type or bit; where it is not, the test above needs the hook."""
    alone, hooked = loaded[name].stock, loaded[name].hooked
    if name in RAISES:
        assert alone.error is not None and not alone.ours and alone.read > 0
    elif name in SILENT:
        assert alone.error is None
        assert SILENT[name] <= set(_wrong(written[name], alone))
    else:
        assert alone.error is None
        assert _wrong(written[name], alone) == []
        _same(alone, hooked)


def test_the_kinds_that_sglang_gets_wrong_are_kinds() -> None:
    assert RAISES.isdisjoint(SILENT) and RAISES | SILENT.keys() < KINDS.keys()


def _same(one: Load, other: Load) -> None:
    assert one.parameters.keys() == other.parameters.keys()
    for parameter, tensor in one.parameters.items():
        mine, theirs = tensor.reshape(-1), other.parameters[parameter].reshape(-1)
        assert mine.dtype == theirs.dtype and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), parameter


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_quark_is_bit_for_bit_untouched(name: str, loaded: dict[str, Loaded]) -> None:
    alone, hooked = loaded[name].stock, loaded[name].hooked
    assert alone.error is None and hooked.error is None
    assert alone.parameters and alone.read == hooked.read
    _same(alone, hooked)


@pytest.mark.parametrize("name", BROKEN)
def test_contradictory_ones_are_refused_before_a_weight_is_read(name: str, loaded: dict[str, Loaded]) -> None:
    load = loaded[name].hooked
    assert load.ours and load.read == 0
    for said in BROKEN[name][1]:
        assert said in str(load.error)
    # SGLang by itself reads on, to an error of shapes or to wrong values.
    assert loaded[name].stock.read > 0 and not loaded[name].stock.ours


def test_the_comparison_can_fail(written: dict[str, Written], loaded: dict[str, Loaded]) -> None:
    """One bit of a packed weight, of a scale, of a plain weight, and a type."""
    one, load = written["mixed"], loaded["mixed"].hooked
    experts, attention = "model.layers.0.mlp.experts.", "model.layers.0.qkv_proj.weight"
    for name, index, module in (
        (f"{experts}w13_weight", (1, 40, 3), "mlp.experts.1.up_proj"),
        (f"{experts}w2_weight_scale", (3, 7, 0), "mlp.experts.3.down_proj"),
        (attention, (130, 5), "self_attn.k_proj"),
    ):
        changed = load.parameters[name].clone()
        changed[index] = changed[index] + 1
        assert _wrong(one, Load(None, False, 0, load.parameters | {name: changed})) == [module]
    wide = load.parameters | {attention: load.parameters[attention].float()}
    assert _wrong(one, Load(None, False, 0, wide)) == [f"self_attn.{name}_proj" for name in "qkv"]


@pytest.mark.parametrize("name", KINDS)
def test_the_types_told_are_the_types_loaded(name: str, written: dict[str, Written], loaded: dict[str, Loaded]) -> None:
    types = mtp_module_types(written[name].directory)
    layer, parameters = written[name].kind.layer, loaded[name].hooked.parameters
    for module in written[name].values:
        stored = module if module.startswith("mtp.") else f"{layer}{module}"
        if stored in types:
            assert types[stored] == value_of(module, parameters)[0], module
    assert len([module for module in types if module.startswith(layer)]) >= 9


def test_the_shared_expert_is_fused_only_into_experts_of_its_own_type(loaded: dict[str, Loaded]) -> None:
    """SGLang asks this on AMD alone; a shared expert of another type would be copied into the experts' buffer as it is."""
    fuses = {name: loaded[name].fuses for name, kind in KINDS.items() if not kind.dense and loaded[name].fuses is not None}
    assert [name for name, fused in fuses.items() if fused] == ["all packed"]
    assert {"mixed", "mixed, experts bf16", "mixed, in all three types and one tensor a fused module"} < set(fuses)
