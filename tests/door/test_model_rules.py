"""The table of models that SGLang does not serve with one of the bases, against SGLang itself: its resolution, its source."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_specverify.flags import BASES
from sglang_specverify.routing.model_rules import _MODEL_REFUSALS, model_refusal
from tests.door.machines import CONFIGS
from tests.door.resolve import PLUGIN, arguments, explained, resolve

pytestmark = pytest.mark.usefixtures("door")

#: Models that SGLang refuses, or serves with another class, only once it runs.
_INKLING = ("InklingForConditionalGeneration", "InklingForConditionalGenerationMTP")
_BY_NAME = ("Dots3NoteForCausalLM", "DiffusionGemmaForBlockDiffusion")
#: Where each base runs.
_MACHINES = {"fa3": "SM90", "fa4": "SM100", "aiter": "gfx950", "triton": "SM90"}
#: Models for which SGLang's resolution has a rule about a base's name.
_EARLY = (
    *("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    *("Llama4ForConditionalGeneration", "Llama4ForCausalLM", "HrmTextForCausalLM", "IQuestQ1ForCausalLM", "IQuestQ1MTP"),
    *("Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
)


def test_every_model_of_the_table_is_here() -> None:
    assert {name for names in _MODEL_REFUSALS.values() for name in names} == {*_EARLY, *_INKLING, *_BY_NAME}


def _config(architecture: str) -> dict[str, Any]:
    if architecture in _INKLING:
        from sglang.srt.configs.inkling import InklingMMConfig

        inkling: dict[str, Any] = json.loads(json.dumps(InklingMMConfig().to_dict(), default=str))
        return {**inkling, "architectures": [architecture], "dtype": "bfloat16"}
    kind = next((kind for kind in ("lfm2", "llama4", "exaone4") if architecture.lower().startswith(kind)), "qwen3")
    return {**CONFIGS[kind], "architectures": [architecture], "sliding_window_pattern": "LG"}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("architecture", _EARLY)
def test_what_resolution_refuses(architecture: str, base: str, models: dict[str, Path], tmp_path: Path) -> None:
    """With the base named on the line and the plugin nowhere."""
    (tmp_path / "config.json").write_text(json.dumps(_config(architecture)))
    line = arguments(_MACHINES[base], {**models, "model": tmp_path}, "model", f"--attention-backend {base}")
    try:
        served = resolve(_MACHINES[base], line)[1].attention_backend == base
    except (AssertionError, ValueError) as error:
        assert base in str(error) or "FA3" in str(error), "refused for another reason"
        served = False
    assert served is (model_refusal(base, (architecture,)) is None)


def test_what_the_forward_pass_of_inkling_asserts() -> None:
    import sglang

    # Read, not imported: the module needs kernel packages of NVIDIA's.
    source = Path(sglang.__path__[0], "srt", "models", "inkling_common", "attn.py").read_text()
    asserts = [node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    (named,) = [test for test in asserts if isinstance(test, ast.Compare) and ast.unparse(test.left) == "attention_backend"]
    allowed = set(ast.literal_eval(named.comparators[0]))
    for architecture in _INKLING:
        assert {base for base in BASES if model_refusal(base, (architecture,)) is None} == allowed


def test_the_class_that_fa4_stands_for_with_diffusion_gemma(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention import attention_registry, triton_backend

    monkeypatch.setattr(triton_backend, "TritonAttnBackend", lambda runner, **_: "another class")
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["DiffusionGemmaForBlockDiffusion"]))
    assert attention_registry.create_flashattention_v4_backend(SimpleNamespace(model_config=config)) == "another class"
    assert model_refusal("fa4", config.hf_config.architectures) is not None


def _cases() -> Iterator[tuple[str, str, str]]:
    yield from (("InklingForConditionalGeneration", machine, base) for machine, base in
                (("SM90", "triton"), ("SM100", "fa4"), ("gfx950", "triton")))  # fmt: skip
    yield from (("HrmTextForCausalLM", machine, "triton") for machine in ("SM90", "SM100", "gfx950"))
    yield from (
        ("IQuestQ1ForCausalLM", "SM90", "fa3"),
        ("Lfm2ForCausalLM", "SM90", "fa3"),
        ("Lfm2MoeForCausalLM", "SM100", "fa4"),
    )


@pytest.mark.parametrize(("architecture", "machine", "base"), _cases())
def test_what_the_plugin_chooses(
    architecture: str, machine: str, base: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_specverify.door import resolution

    monkeypatch.setattr(resolution, "_installed", lambda: frozenset({"aiter"}))
    (tmp_path / "config.json").write_text(json.dumps(_config(architecture)))
    line = arguments(machine, {**models, "model": tmp_path}, "model", PLUGIN)
    assert resolve(machine, line)[1].attention_backend == base
    assert explained(machine, line, aiter=True).base.base == base
