"""Models that SGLang serves with a backend of its own, sparse or for their prompts: the door and `explain` refuse them alike.

The predicates are SGLang's; torch is told of an H200, of which SGLang asks it for some of these models.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_specverify.door.models import sparse_kind_of
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing import model_rules
from sglang_specverify.routing.model import describe
from tests.door.machines import CONFIGS
from tests.door.resolve import CHAIN, PLUGIN, TREE, arguments, explained, resolve

pytestmark = pytest.mark.usefixtures("door")

_DENSE, _MLA = CONFIGS["qwen3"], CONFIGS["deepseek-v3"]
_INDEX = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
_SALA = {
    **{key: value for key, value in _DENSE.items() if key != "model_type"},
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm_sala",
    "sparse_config": {"kernel_size": 32, "kernel_stride": 16, "block_size": 64, "topk": 64, "dense_len": 8192},
}
_QSA = {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4}
_QWEN4 = {**_DENSE, "model_type": "qwen4_exp_text", "architectures": None}

#: Kind -> config.json of such a model, and of its neighbour that SGLang serves dense.
SPARSE: dict[str, dict[str, Any]] = {
    "dsa": {**_MLA, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **_INDEX},
    "minicpm": _SALA,
    "minimax": {**_DENSE, "architectures": ["MiniMaxM3SparseForCausalLM"]},
    "qsa": {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": {**_QWEN4, **_QSA}},
    "dsv4": CONFIGS["deepseek-v4"],
}
DENSE: dict[str, dict[str, Any]] = {
    "dsa": _MLA,
    "minicpm": {**_SALA, "sparse_config": None},
    "minimax": {**_DENSE, "architectures": ["MiniMaxM2ForCausalLM"]},
    "qsa": {**SPARSE["qsa"], "text_config": _QWEN4},
    "dsv4": _MLA,
}

Models = dict[str, Path]


@pytest.fixture
def write(models: Models, tmp_path: Path) -> Callable[[dict[str, Any]], Models]:
    """The session's models and one more, "model"."""

    def write(config: dict[str, Any]) -> Models:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return {**models, "model": tmp_path}

    return write


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=140 << 30, name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, **__: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_, **__: facts)


def said(models: Models, line: str, what: str, remedy: str) -> None:
    """Both halves refuse `line`, in one text."""
    given = arguments("SM90", models, "model", line)
    with pytest.raises(SpecverifyError) as raised:
        resolve("SM90", given)
    assert what in raised.value.what and remedy in raised.value.remedy
    assert explained("SM90", given, aiter=False).refused == f"{raised.value.what}; {raised.value.remedy}"


_NEXTN = "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"


@pytest.mark.parametrize("line", [PLUGIN, f"{PLUGIN} {_NEXTN}", f"{PLUGIN} {TREE}", f"{PLUGIN} {CHAIN}"])
@pytest.mark.parametrize("kind", SPARSE)
def test_a_sparse_model_is_not_served_dense(kind: str, line: str, write: Callable[[dict[str, Any]], Models]) -> None:
    backend, _ = model_rules.SPARSE_BACKENDS[kind]
    said(write(SPARSE[kind]), line, f"with its own sparse backend, {backend}", "leave --attention-backend out")


def test_each_option_that_names_the_plugin_is_named(write: Callable[[dict[str, Any]], Models]) -> None:
    models = write(SPARSE["dsa"])
    said(
        models, "--prefill-attention-backend specverify", "--prefill-attention-backend: ", "leave --prefill-attention-backend out"
    )
    both = "--prefill-attention-backend specverify --decode-attention-backend specverify"
    said(models, both, "sparse backend", "leave --prefill-attention-backend and --decode-attention-backend out")
    own = "--attention-backend dsa --speculative-draft-attention-backend specverify"
    said(models, f"{own} {_NEXTN}", "--speculative-draft-attention-backend: ", "leave --speculative-draft-attention-backend out")


def test_a_dense_draft_of_a_sparse_model_is_served(write: Callable[[dict[str, Any]], Models]) -> None:
    line = f"--attention-backend dsa --speculative-draft-attention-backend specverify {CHAIN.replace('STANDALONE', 'EAGLE3')}"
    given = arguments("SM90", write(SPARSE["dsa"]), "model", line)
    assert resolve("SM90", given)[1].speculative_draft_attention_backend == "fa3"
    assert explained("SM90", given, aiter=False).refused == ""


def test_a_sparse_draft_of_a_dense_model_is_not(write: Callable[[dict[str, Any]], Models]) -> None:
    models = write(_MLA)
    (models["model"] / "draft").mkdir()
    (models["model"] / "draft" / "config.json").write_text(json.dumps(SPARSE["dsa"]))
    line = f"{PLUGIN} {_NEXTN} --speculative-draft-model-path {models['model'] / 'draft'}"
    said(models, line, "SGLang serves DeepseekV32ForCausalLM with its own sparse backend", "leave --attention-backend out")


@pytest.mark.parametrize("kind", DENSE)
def test_its_dense_neighbour_is_served(kind: str, write: Callable[[dict[str, Any]], Models]) -> None:
    given = arguments("SM90", write(DENSE[kind]), "model", PLUGIN)
    assert resolve("SM90", given)[1].attention_backend == "fa3"
    assert explained("SM90", given, aiter=False).refused == ""


def test_minicpm_that_sglang_makes_dense(write: Callable[[dict[str, Any]], Models], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MINICPM_FORCE_DENSE", "1")
    models = write(SPARSE["minicpm"])
    for draft in ("qwen3", "model"):
        given = arguments("SM90", models, "model", f"{PLUGIN} {TREE.replace('{qwen3}', '{' + draft + '}')}")
        assert resolve("SM90", given)[1].attention_backend == "fa3"
        explanation = explained("SM90", given, aiter=False)
        assert explanation.refused == "" and not any(row.layers.facts.unknown for row in explanation.rows)


def test_dsv4_asks_for_no_name(write: Callable[[dict[str, Any]], Models], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_SPARSE_MLA", "1")
    given = arguments("SM90", write(SPARSE["dsv4"]), "model", "")
    assert resolve("SM90", given)[1].attention_backend == "dsv4"
    assert "own sparse backend" not in explained("SM90", given, aiter=False).refused


def test_prompts_that_flashinfer_alone_serves(write: Callable[[dict[str, Any]], Models]) -> None:
    models = write({**_DENSE, "architectures": ["MossVLForConditionalGeneration"]})
    said(
        models,
        PLUGIN,
        "serves the prompts of MossVLForConditionalGeneration with flashinfer alone",
        "leave --attention-backend out",
    )
    line = "--prefill-attention-backend flashinfer --decode-attention-backend specverify"
    given = arguments("SM90", models, "model", line)
    assert resolve("SM90", given)[1].decode_attention_backend == "fa3"
    assert explained("SM90", given, aiter=False).refused == ""


@pytest.mark.parametrize(
    ("predicate", "names", "keys"),
    [("is_deepseek_dsa", "_DSA", _INDEX), ("is_deepseek_v4", "_DSV4", {}), ("is_minimax_sparse", "_MINIMAX", {})],
)
def test_the_lists_of_models_are_those_of_sglang(predicate: str, names: str, keys: dict[str, Any]) -> None:
    from sglang.srt.configs import model_config

    source = ast.parse(inspect.getsource(getattr(model_config, predicate)))
    words = [node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    listed = getattr(model_rules, names)
    assert {word for word in words if word[0].isupper()} == set(listed)
    for name in listed:
        config = {**_MLA, "architectures": [name], **keys}
        assert describe(config).sparse == sparse_kind_of(SimpleNamespace(**config)) != ""
    config = {**_MLA, "architectures": ["AnotherForCausalLM"], **keys}
    assert describe(config).sparse == sparse_kind_of(SimpleNamespace(**config)) == ""
