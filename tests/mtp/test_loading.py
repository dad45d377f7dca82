"""The check between a plan and the model that SGLang built from it, and the renaming of tensors."""

from __future__ import annotations

import pytest
import torch

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.mtp.decide import read_plan
from sglang_specverify.mtp.loading import Change, changed, changes, check
from tests.mtp.checkpoints import Written
from tests.mtp.conftest import Loaded


def test_parameters_and_tensors_must_meet(written: dict[str, Written], loaded: dict[str, Loaded]) -> None:
    plan = read_plan(written["mixed"].directory)
    names = set(loaded["mixed"].hooked.parameters)
    assert "model.layers.0.attn.k_scale" in names
    check(plan, names)
    with pytest.raises(SpecverifyError, match=r"no tensor of .* fills model\.layers\.0\.o_proj\.weight_scale"):
        check(plan, names | {"model.layers.0.o_proj.weight_scale"})
    with pytest.raises(SpecverifyError, match=r"no parameter for mtp\.layers\.0\.mlp\.experts\.0\.down_proj\.weight_scale of "):
        check(plan, names - {"model.layers.0.mlp.experts.w2_weight_scale"})
    # On AMD the shared expert may be one more routed expert; then it has no parameters of its own.
    apart = {name for name in names if ".shared_expert." not in name}
    check(plan, apart, shared_expert_fused=True)
    with pytest.raises(SpecverifyError, match=r"no parameter for mtp\.layers\.0\.mlp\.shared_expert\."):
        check(plan, apart)


def test_only_what_differs_is_changed(written: dict[str, Written]) -> None:
    assert changes(read_plan(written["mixed"].directory)) == {}
    absolute = changes(read_plan(written["stored by absolute index"].directory))
    assert absolute["mtp.layers.4.self_attn.o_proj.weight"] == Change("mtp.layers.0.self_attn.o_proj.weight")
    assert "mtp.fc.weight" not in absolute
    packed = changes(read_plan(written["mixed, in all three types and one tensor a fused module"].directory))
    assert packed == {}
    block = changes(read_plan(written["mixed, FP8 attention by block"].directory))
    assert {change.name.rpartition(".")[2] for change in block.values()} == {"weight_scale_inv"} and len(block) == 4


def test_tensors_pass_in_order() -> None:
    table = {"a": Change("b"), "c": Change("d", flat=True)}
    scale = torch.ones(3, 1)
    tensors = [("x", 1), ("a", 2), ("b", 3), ("c", scale), ("mtp.layers.60.self_attn.k_scale", 4), ("model.layers.59.x", 5)]
    *rest, (name, flat), cache, target = changed(iter(tensors), table, 60)
    assert rest == [("x", 1), ("b", 2), ("b", 3)]
    assert name == "d" and flat.shape == (3,)
    assert (cache, target) == (("mtp.layers.0.self_attn.k_scale", 4), ("model.layers.59.x", 5))
