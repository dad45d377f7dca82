"""What `specverify` resolves to in SGLang's own resolution, for each machine and server line, and what `explain` says.

The expected bases are written out from the door's specification, not computed by the code under test.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_specverify.door import resolution
from sglang_specverify.door.request import FIELDS
from sglang_specverify.errors import SpecverifyError
from tests.door.machines import MACHINES
from tests.door.resolve import CHAIN, NGRAM, PLUGIN, TREE, arguments, explained, resolve

pytestmark = pytest.mark.usefixtures("door")


@dataclass(frozen=True)
class Line:
    """A server line and the base it resolves to: on SM90, on SM100 and its successors, on AMD with aiter, without a GPU."""

    line: str
    model: str
    hopper: str
    blackwell: str
    amd: str
    none: str = "triton"
    #: Page size where SGLang's own rules leave it alone; it forces 128 for chains over fa4 on Blackwell.
    page_size: int = 1
    #: On gfx942, where that differs from gfx950.
    older_amd: str = ""

    def base(self, machine: str) -> str:
        if machine == "none":
            return self.none
        if machine == "gfx942" and self.older_amd:
            return self.older_amd
        return self.amd if machine.startswith("gfx") else self.hopper if machine == "SM90" else self.blackwell


_TREE_ON_PAGES = ("fa3", "triton", "triton")
_CHAIN_EAGLE = "--speculative-algorithm EAGLE --speculative-draft-model-path {qwen3}"
LINES = {
    "no speculation": Line(PLUGIN, "qwen3", "fa3", "fa4", "aiter"),
    "chain": Line(f"{PLUGIN} {CHAIN}", "qwen3", "fa3", "fa4", "aiter"),
    "chain, pages of 16": Line(f"{PLUGIN} {CHAIN} --page-size 16", "qwen3", "fa3", "fa4", "aiter", page_size=16),
    "tree": Line(f"{PLUGIN} {TREE}", "qwen3", "fa3", "fa4", "aiter"),
    "tree, pages of 16": Line(f"{PLUGIN} {TREE} --page-size 16", "qwen3", *_TREE_ON_PAGES, page_size=16),
    "tree, pages of 64": Line(f"{PLUGIN} {TREE} --page-size 64", "qwen3", *_TREE_ON_PAGES, page_size=64),
    "tree that SGLang chooses": Line(f"{PLUGIN} {_CHAIN_EAGLE}", "llama-128", "fa3", "fa4", "aiter"),
    "chain that SGLang chooses": Line(f"{PLUGIN} {_CHAIN_EAGLE}", "qwen3", "fa3", "fa4", "aiter"),
    "EAGLE3": Line(f"{PLUGIN} {TREE.replace('STANDALONE', 'EAGLE3')}", "qwen3", "fa3", "fa4", "aiter"),
    "NGRAM": Line(f"{PLUGIN} {NGRAM}", "qwen3", "fa3", "fa4", "aiter"),
    "NGRAM, in lower case": Line(f"{PLUGIN} {NGRAM.replace('NGRAM', 'ngram')}", "qwen3", "fa3", "fa4", "aiter"),
    "tree that SGLang chooses, in lower case": Line(
        f"{PLUGIN} {_CHAIN_EAGLE.replace('EAGLE', 'eagle')}", "llama-128", "fa3", "fa4", "aiter"
    ),
    "NGRAM, breadth 1, pages": Line(
        f"{PLUGIN} {NGRAM} --speculative-ngram-max-bfs-breadth 1 --page-size 16", "qwen3", "fa3", "fa4", "aiter", page_size=16
    ),
    "e4m3 cache": Line(f"{PLUGIN} {TREE} --kv-cache-dtype fp8_e4m3", "qwen3", "fa3", "fa4", "aiter", older_amd="triton"),
    "e5m2 cache": Line(f"{PLUGIN} {TREE} --kv-cache-dtype fp8_e5m2", "qwen3", "triton", "triton", "aiter", older_amd="triton"),
    "e5m2 cache, chain": Line(f"{PLUGIN} {CHAIN} --kv-cache-dtype fp8_e5m2", "qwen3", "triton", "triton", "aiter"),
    "e4m3 cache, chain": Line(f"{PLUGIN} {CHAIN} --kv-cache-dtype fp8_e4m3", "qwen3", "fa3", "fa4", "aiter"),
    "float32": Line(f"{PLUGIN} {TREE} --dtype float32", "qwen3", "triton", "triton", "triton"),
    "deterministic": Line(f"{PLUGIN} {CHAIN} --enable-deterministic-inference", "qwen3", "fa3", "fa4", "triton"),
    "head dim 64": Line(f"{PLUGIN} {TREE}", "llama-64", "fa3", "fa4", "aiter"),
    "head dim 80": Line(f"{PLUGIN} {TREE}", "llama-80", "fa3", "fa4", "aiter"),
    "head dim 96": Line(f"{PLUGIN} {TREE}", "llama-96", "fa3", "fa4", "aiter"),
    "head dim 192": Line(f"{PLUGIN} {TREE}", "llama-192", "fa3", "triton", "aiter"),
    "head dim 256": Line(f"{PLUGIN} {TREE}", "llama-256", "fa3", "triton", "aiter"),
    "two head dims": Line(f"{PLUGIN} {CHAIN}", "two head dims", "fa3", "triton", "aiter"),
    "sinks": Line(f"{PLUGIN} {CHAIN}", "gpt-oss", "fa3", "fa4", "aiter"),
    "a model that SGLang bars from fa4": Line(f"{PLUGIN} {CHAIN}", "llama4", "fa3", "triton", "aiter"),
    "a model that SGLang bars from fa4 and aiter": Line(f"{PLUGIN} {CHAIN}", "exaone4", "fa3", "triton", "triton"),
    "MLA, tree": Line(f"{PLUGIN} {TREE}", "deepseek-v3", "fa3", "fa4", "triton"),
    "MLA": Line(f"{PLUGIN} {CHAIN}", "deepseek-v3", "fa3", "fa4", "aiter"),
    "overlap of a chain's batches": Line(f"{PLUGIN} {CHAIN} --enable-two-batch-overlap", "qwen3", "fa3", "fa4", "aiter"),
}


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package aiter, as far as the choice of a base asks for it."""
    monkeypatch.setattr(resolution, "find_spec", lambda name: object() if name == "aiter" else find_spec(name))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("case", LINES)
def test_base(case: str, name: str, models: dict[str, Path], aiter: None) -> None:
    wanted = LINES[case]
    line = arguments(name, models, wanted.model, wanted.line)
    raw, view = resolve(name, line)
    base = wanted.base(name)
    assert view.attention_backend == base
    assert raw.attention_backend == "specverify", "the user's own word must survive, the factories look for it"
    said = explained(name, line, aiter=True)
    assert said.base.base == base
    forced = base == "fa4" and (view.speculative_eagle_topk or 1) == 1 and wanted.model != "deepseek-v3"
    assert view.page_size == (128 if forced and name != "SM90" else wanted.page_size)
    assert said.server.page_size == view.page_size
    assert said.server.topk == (view.speculative_eagle_topk or 1)


@pytest.mark.parametrize("base", ["triton", "fa3"])
def test_deterministic_inference_keeps_the_prefix_cache(
    base: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang refuses backends that it does not know in that mode, and takes the prefix cache from some: it must see the base."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_BASE", base)
    raw, view = resolve("SM90", arguments("SM90", models, "qwen3", LINES["deterministic"].line))
    assert (view.attention_backend, raw.attention_backend) == (base, "specverify")
    assert view.enable_deterministic_inference and not view.disable_radix_cache
    assert view.sampling_backend == "pytorch"


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("case", ["no speculation", "chain", "tree", "tree, pages of 16", "MLA"])
def test_amd_without_aiter(case: str, name: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "find_spec", lambda _: None)
    line = arguments(name, models, LINES[case].model, LINES[case].line)
    assert resolve(name, line)[1].attention_backend == "triton"
    assert explained(name, line, aiter=False).base.base == "triton"


@dataclass(frozen=True)
class Split:
    """Resolved (attention, prefill, decode, draft) where the plugin's base is "BASE" and "*" is SGLang's to choose."""

    line: str
    resolved: tuple[str | None, str | None, str | None, str | None]


SPLITS = {
    "prefill and decode": Split(
        "--prefill-attention-backend specverify --decode-attention-backend triton", ("*", "BASE", "triton", None)
    ),
    "prefill alone": Split("--prefill-attention-backend specverify", ("*", "BASE", None, None)),
    "decode, which verifies": Split(
        "--decode-attention-backend specverify --speculative-attention-mode decode", ("*", None, "BASE", None)
    ),
    "both halves": Split(
        "--prefill-attention-backend specverify --decode-attention-backend specverify", ("BASE", "BASE", "BASE", None)
    ),
    "draft alone": Split(
        "--attention-backend triton --speculative-draft-attention-backend specverify", ("triton", None, None, "BASE")
    ),
    "all but the draft": Split(f"{PLUGIN} --speculative-draft-attention-backend triton", ("BASE", None, None, "triton")),
    "target and draft by name": Split(f"{PLUGIN} --speculative-draft-attention-backend specverify", ("BASE", None, None, "BASE")),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("split", SPLITS)
def test_each_of_the_four_names(split: str, name: str, models: dict[str, Path], aiter: None) -> None:
    wanted = SPLITS[split]
    line = arguments(name, models, "qwen3", f"{wanted.line} {CHAIN}")
    raw, view = resolve(name, line)
    base = LINES["chain"].base(name)
    for field, resolved in zip(FIELDS, wanted.resolved, strict=True):
        if resolved != "*":
            assert getattr(view, field) == (base if resolved == "BASE" else resolved), field
    assert "specverify" not in {getattr(view, field) for field in FIELDS}
    assert "specverify" in {getattr(raw, field) for field in FIELDS}
    assert explained(name, line, aiter=True).base.base == base


@pytest.mark.parametrize(("name", "base"), [("SM90", "fa3"), ("SM100", "triton")])
def test_pages_that_sglang_forces_after_the_model_step(name: str, base: str, models: dict[str, Path]) -> None:
    """The base is chosen once more in the speculative step: fa4 was right for this tree until SGLang changed the page size."""
    draft = "--speculative-draft-attention-backend trtllm_mha"
    _, view = resolve(name, arguments(name, models, "qwen3", f"{PLUGIN} {TREE} {draft}"))
    assert (view.page_size, view.attention_backend) == (64, base)


_DP = "--enable-dp-attention --tp-size 2 --dp-size 2"
_OTHER_WAYS = [
    # Adaptive drafts are chains; SGLang switches them off where it cannot synchronise them, and then chooses a tree.
    ("EAGLE", "--speculative-adaptive", 1, 128),
    ("NEXTN", "--speculative-adaptive", 1, 128),
    ("eagle", "--speculative-adaptive", 1, 128),
    ("EAGLE", f"--speculative-adaptive {_DP}", 4, 1),
    ("nextn", f"--speculative-adaptive {_DP}", 4, 1),
    ("EAGLE", "--speculative-adaptive --enable-multi-layer-eagle", 4, 1),
    # It asks for this name in capitals, after it has made them.
    ("standalone", "", 1, 128),
]


@pytest.mark.parametrize(("algorithm", "options", "topk", "page_size"), _OTHER_WAYS)
def test_trees_that_sglang_chooses_after_all(
    algorithm: str, options: str, topk: int, page_size: int, models: dict[str, Path]
) -> None:
    """On SM100 the tree that is expected must be the one that comes: SGLang forces pages of 128 for a chain alone."""
    draft = f"--speculative-algorithm {algorithm} --speculative-draft-model-path {{qwen3}} {options}"
    _, view = resolve("SM100", arguments("SM100", models, "llama-128", f"{PLUGIN} {draft}"))
    assert (view.speculative_eagle_topk, view.page_size, view.attention_backend) == (topk, page_size, "fa4")


def test_a_server_that_does_not_ask_is_left_alone(models: dict[str, Path]) -> None:
    """Same resolution as in a process without the plugin, even with a flag of the plugin that is wrong."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.entrypoints.engine import Engine

    os.environ["SGLANG_SPECVERIFY_BASE"] = "nonsense"
    line = arguments("SM90", models, "qwen3", f"--attention-backend triton --random-seed 1 {TREE}")
    with_plugin = resolve("SM90", line)[0]._resolved_overrides
    resolution_hooks._HOOKS.clear()
    assert with_plugin == resolve("SM90", line)[0]._resolved_overrides
    assert not getattr(Engine._launch_scheduler_processes, "_specverify", False)


def test_the_word_survives_the_way_into_the_scheduler(models: dict[str, Path]) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    raw, _ = resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE}"))
    arrived = pickle.loads(pickle.dumps(raw))
    assert (arrived.attention_backend, resolved_view(arrived).attention_backend) == ("specverify", "fa3")


@pytest.mark.parametrize(("name", "base"), [("SM90", "fa4"), ("SM90", "triton"), ("SM100", "triton"), ("gfx950", "triton")])
def test_the_flag_chooses_another_base(name: str, base: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_BASE", base)
    line = arguments(name, models, "qwen3", f"{PLUGIN} {TREE}")
    assert resolve(name, line)[1].attention_backend == base
    said = explained(name, line, aiter=False)
    assert (said.base.base, said.base.reason) == (base, f"SGLANG_SPECVERIFY_BASE={base}")


def test_the_reason_is_logged(models: dict[str, Path], log: list[str]) -> None:
    resolve("SM100", arguments("SM100", models, "qwen3", f"{PLUGIN} {TREE} --page-size 16"))
    text = "\n".join(log)
    assert "specverify resolves to triton: fa4 is preferred on SM100, but: SGLang refuses fa4 for topk 4" in text
    assert "resolved {'attention_backend': 'triton'}" in text


def test_every_machine_of_the_specification_is_here() -> None:
    assert set(MACHINES) == {"SM90", "SM100", "SM103", "SM107", "gfx942", "gfx950", "none"}


def test_the_machines_are_told_apart(models: dict[str, Path]) -> None:
    """The faked facts reach the plugin: an override that did nothing would resolve every machine alike."""
    from sglang.srt.runtime_context import get_platform

    from sglang_specverify.hardware import from_sglang_platform
    from tests.door.machines import device_of, machine

    families = {}
    for name in MACHINES:
        with machine(name):
            families[name] = from_sglang_platform(get_platform(), device_of(name)).family
    assert families == {
        **{name: name.lower() for name in ("SM90", "SM100", "SM103", "SM107", "gfx942")},
        "gfx950": "gfx95x",
        "none": "none",
    }


def test_a_broken_flag_of_the_plugin_is_an_error_once_it_is_asked_for(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREES", "0")
    with pytest.raises(SpecverifyError, match="did you mean SGLANG_SPECVERIFY_TREE"):
        resolve("SM90", arguments("SM90", models, "qwen3", PLUGIN))


def test_a_family_with_keys_of_its_own_still_starts(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some families name their layers as nobody else does; then SGLang's own reading of the head dims decides."""

    def unreadable(config: object) -> None:
        raise SpecverifyError("the config has no num_hidden_layers")

    monkeypatch.setattr(resolution, "describe", unreadable)
    for model, base in (("llama-128", "fa4"), ("llama-256", "triton")):
        assert resolve("SM100", arguments("SM100", models, model, f"{PLUGIN} {CHAIN}"))[1].attention_backend == base


def test_facts_that_came_late_are_asked_again(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that turned out wrong after the last declaration stops the server instead of serving."""
    monkeypatch.setattr(resolution, "refusal_of", lambda *_: "pages came late")
    with pytest.raises(SpecverifyError, match="fa3 was resolved before all was known, and cannot serve this: pages came late"):
        resolve("SM90", arguments("SM90", models, "qwen3", f"{PLUGIN} {TREE}"))
