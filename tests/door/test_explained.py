"""What `specverify explain` says of a server, beside what SGLang's resolution makes of the same line: fact by fact."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sglang_specverify.cli.describe import Explanation
from sglang_specverify.door import resolution
from sglang_specverify.errors import SpecverifyError
from tests.door.machines import CONFIGS
from tests.door.resolve import CHAIN, PLUGIN, TREE, arguments, explained, resolve
from tests.door.test_resolution import LINES

pytestmark = pytest.mark.usefixtures("door", "aiter")

_EAGLE = f"{PLUGIN} --speculative-algorithm EAGLE --speculative-draft-model-path"
_ADAPTIVE = f"{_EAGLE} {{qwen3}} --speculative-adaptive"
_CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
_TREE = "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
_TWO_GROUPS = "--tp-size 2 --dp-size 2 --enable-dp-attention"
_ANYWHERE = ("SM90", "SM100", "gfx950")

#: Case -> model, line, machines.
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **{case: (of.model, of.line, _ANYWHERE) for case, of in LINES.items()},
    "context of 4k": ("qwen3", f"{PLUGIN} {TREE} --context-length 4k", _ANYWHERE),
    "context of 4Ki": ("qwen3", f"{PLUGIN} {TREE} --context-length 4Ki", _ANYWHERE),
    "context of a stretched rope": ("stretched", f"{PLUGIN} {TREE}", _ANYWHERE),
    "context by another key": ("another key", f"{PLUGIN} {TREE}", _ANYWHERE),
    "no steps": ("qwen3", f"{PLUGIN} {CHAIN} --speculative-num-steps 0", _ANYWHERE),
    "adaptive": ("llama-128", _ADAPTIVE, _ANYWHERE),
    "adaptive, from one step": ("llama-128", f"{_ADAPTIVE} --speculative-num-steps 1", _ANYWHERE),
    "adaptive, with a topk": ("llama-128", f"{_ADAPTIVE} --speculative-eagle-topk 1 --speculative-num-steps 5", _ANYWHERE),
    "adaptive, EAGLE3": ("llama-128", _ADAPTIVE.replace("EAGLE", "EAGLE3"), _ANYWHERE),
    "adaptive, from a file": ("llama-128", f"{_ADAPTIVE} --speculative-adaptive-config {{steps}}", _ANYWHERE),
    "adaptive, dropped for a tree": ("llama-128", f"{_ADAPTIVE} {_TREE}", _ANYWHERE),
    "adaptive, dropped for STANDALONE": ("llama-128", f"{PLUGIN} {CHAIN} --speculative-adaptive", _ANYWHERE),
    "adaptive, dropped for groups": ("llama-128", f"{_ADAPTIVE} {_TWO_GROUPS}", _ANYWHERE),
    "adaptive, dropped for several layers": ("llama-128", f"{_ADAPTIVE} --enable-multi-layer-eagle", _ANYWHERE),
    "a trainer's numbers": ("qwen3", f"{PLUGIN} {CHAIN} --rl-on-policy-target fsdp", _ANYWHERE),
    "a trainer's numbers, tree": ("qwen3", f"{PLUGIN} {TREE} --rl-on-policy-target fsdp", ("SM90", "gfx950")),
    "a draft that reads the target's cache": ("llama-128", f"{_EAGLE} {{assistant}} {_CHAIN}", _ANYWHERE),
    "a draft that reads it, tree": ("llama-128", f"{_EAGLE.replace('EAGLE', 'nextn')} {{assistant}} {_TREE}", _ANYWHERE),
    "requests of its own": ("qwen3", f"{PLUGIN} {CHAIN} --max-running-requests 4", _ANYWHERE),
    "cut short": (
        "qwen3",
        "--attention-back specverify --speculative-alg=ngram --speculative-num-draft 8 --speculative-ngram-max-b 1 "
        "--context-len 2k --enable-determ",
        _ANYWHERE,
    ),
    "the last of two spellings": ("qwen3", f"--attention-b triton {PLUGIN} {CHAIN} --context-length 9 --context-l 2k", _ANYWHERE),
}


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package aiter, as far as the choice of a base asks for it."""
    monkeypatch.setattr(resolution, "find_spec", lambda name: object() if name == "aiter" else find_spec(name))


@pytest.fixture(scope="module")
def named(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models, some more of them, and a file of steps."""
    found, directory = dict(models), tmp_path_factory.mktemp("more")
    more: dict[str, dict[str, Any]] = {
        "stretched": {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "another key": {"seq_length": 999},
        "assistant": {"architectures": ["Gemma4AssistantForCausalLM"]},
    }
    for name, keys in more.items():
        found[name] = directory / name.replace(" ", "-")
        found[name].mkdir()
        (found[name] / "config.json").write_text(json.dumps({**CONFIGS["llama-128"], **keys}))
    found["steps"] = directory / "steps.json"
    found["steps"].write_text(json.dumps({"1": {"candidate_steps": [2, 4, 6]}}))
    return found


def _facts(said: Explanation) -> dict[str, Any]:
    server = said.server
    return {
        "base": said.base.base,
        "algorithm": server.algorithm,
        "topk": server.topk,
        "steps": server.num_steps,
        "draft tokens": server.num_draft_tokens,
        "page size": server.page_size,
        "deterministic": server.deterministic,
        "context": server.context,
        "requests": server.requests,
        "KV cache": server.kv_cache_dtype,
    }


def _resolved(raw: Any, view: Any) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import model_config_of

    return {
        "base": view.attention_backend,
        "algorithm": view.speculative_algorithm,
        "topk": view.speculative_eagle_topk or 1,
        "steps": view.speculative_num_steps or 0,
        "draft tokens": view.speculative_num_draft_tokens or 0,
        "page size": view.page_size,
        "deterministic": view.enable_deterministic_inference,
        "context": model_config_of(raw).context_len,
        "requests": view.max_running_requests or 0,
        "KV cache": view.kv_cache_dtype,
    }


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, (_, _, names) in CASES.items() for name in names])
def test_explain_says_what_sglang_resolves(case: str, name: str, named: dict[str, Path]) -> None:
    model, line, _ = CASES[case]
    given = arguments(name, named, model, line)
    assert _facts(explained(name, given, aiter=True)) == _resolved(*resolve(name, given))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (f"{_EAGLE} {{qwen3}} --speculative-num-steps 3", "--speculative-num-steps 3 came without --speculative-eagle-topk"),
        (f"{_EAGLE} {{qwen3}} --speculative-eagle-topk 4", "--speculative-eagle-topk 4 came without --speculative-num-steps"),
        (f"{_EAGLE} {{qwen3}} --speculative-num-draft-tokens 4", "--speculative-num-draft-tokens 4 came without"),
        (f"{_EAGLE.replace('EAGLE', 'EAGLE3')} {{assistant}} {_CHAIN}", "EAGLE3 came with the draft Gemma4Assistant"),
        (f"{_ADAPTIVE} --speculative-num-steps 2", "--speculative-num-steps 2 came with --speculative-adaptive"),
        (f"{_ADAPTIVE} --speculative-adaptive-config {{qwen3}}", "--speculative-adaptive-config .* cannot be read"),
        (f"{PLUGIN} --use-ray", "Ray actors load no plugin"),
        (f"{PLUGIN} --us", "Ray actors load no plugin"),
        (f"{PLUGIN} --smg-grpc-mode", "no handshake would show"),
    ],
)
def test_neither_takes_it(line: str, what: str, named: dict[str, Path]) -> None:
    """SGLang says most of these with an assertion or a TypeError; `explain` says what is missing."""
    given = arguments("SM90", named, "llama-128", line)
    with pytest.raises(Exception):  # noqa: B017 - whatever it is, the server does not start
        resolve("SM90", given)
    with pytest.raises(SpecverifyError, match=what):
        explained("SM90", given, aiter=True)


def test_a_server_without_the_plugin_may_use_ray(named: dict[str, Path]) -> None:
    given = arguments("SM90", named, "qwen3", "--attention-backend fa3 --use-ray")
    assert resolve("SM90", given)[1].attention_backend == "fa3"
    assert {row.decision.kernel for row in explained("SM90", given, aiter=True).rows} == {"stock"}
