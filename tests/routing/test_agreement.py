"""What is said of SGLang from outside is what the installed SGLang says of itself."""

from __future__ import annotations

import argparse
import copy
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_specverify.cli.serve import _ASKS_TO_COMPILE, _WITHOUT_GPU
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import from_sglang_platform
from sglang_specverify.routing import draft, options, server
from sglang_specverify.routing.model import describe
from tests.routing.configs import LLAMA_3_70B, QWEN3_8B, Config

pytest.importorskip("sglang")


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def test_every_option_that_is_read_or_filled_in_exists(parser: argparse.ArgumentParser) -> None:
    filled = [option[0] for option, _ in _WITHOUT_GPU]
    settled = [spelling for _, spellings in _WITHOUT_GPU for spelling in spellings]
    for _, full, _ in options._SPELLINGS:
        assert full in parser._option_string_actions, full
    assert {*filled, *settled, _ASKS_TO_COMPILE} <= {name for _, _, name in options._SPELLINGS}


def test_spellings_of_one_option_are_one_option_there(parser: argparse.ArgumentParser) -> None:
    kinds: dict[str, set[str]] = {}
    for _, full, name in options._SPELLINGS:
        kinds.setdefault(name, set()).add(parser._option_string_actions[full].dest)
    assert [name for name, destinations in kinds.items() if len(destinations) != 1] == []


def test_options_are_cut_short_as_sglang_takes_them(parser: argparse.ArgumentParser) -> None:
    """Every beginning of every option of SGLang's: where its parser takes it for one that is read here, so does `option_of`."""
    ours = {full: name for _, full, name in options._SPELLINGS}
    # SGLang looks for this word itself, before its parser runs.
    whole = "--config"
    taken = 0
    for option in parser._option_string_actions:
        for end in range(len("--x"), len(option) + 1):
            word = option[:end]
            meant = (
                [word]
                if word in parser._option_string_actions
                else [o for o in parser._option_string_actions if o.startswith(word)]
            )
            if len(meant) == 1 and (meant != [whole] or word == whole):
                assert options.option_of(word) == options.option_of(f"{word}=1") == ours.get(meant[0]), word
                taken += word not in parser._option_string_actions and meant[0] in ours
    assert taken > 100


def test_a_file_of_options_is_asked_for_by_its_whole_name() -> None:
    assert options.option_of("--config") == "--config"
    assert options.option_of("--conf") is None


def test_switches_take_no_value_and_the_others_do(parser: argparse.ArgumentParser) -> None:
    for name in options._SWITCH_NAMES:
        assert parser._option_string_actions[name].nargs == 0, name
    for _, full, name in options._SPELLINGS:
        if name not in options._SWITCH_NAMES:
            assert parser._option_string_actions[full].nargs != 0, full


@pytest.mark.parametrize(
    "value", ["1", "1k", "1Ki", "3M", "1.5k", "1.0009k", "1.5Ki", "1K", "1_000", " 7", "+7", "7.0", "k", "many", ""]
)
@pytest.mark.parametrize("option", options._INTEGER_NAMES)
def test_numbers(parser: argparse.ArgumentParser, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        given = parser.parse_args(["--model-path", "M", f"{option}={value}"])
        sglang = getattr(given, parser._option_string_actions[option].dest)
    except SystemExit:
        sglang = None
    try:
        ours = options.parse([f"{option}={value}"]).integers[option]
    except SpecverifyError as error:
        ours = None
        assert error.what.startswith(f"{option} {value} is no ")
    assert ours == sglang


@pytest.mark.parametrize("config", [QWEN3_8B, LLAMA_3_70B, {**QWEN3_8B, "architectures": ["Grok1ForCausalLM"]}], ids=str)
@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE"])
def test_trees_that_sglang_chooses_itself(config: Config, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from sglang.srt.arg_groups import speculative_hook

    def view(record: Any) -> Any:
        return record

    monkeypatch.setattr(speculative_hook, "resolving_view", view)
    record = SimpleNamespace(speculative_algorithm=algorithm)
    chosen = speculative_hook._auto_choose_speculative_params(record, config["architectures"][0])
    line = options.parse(["--speculative-algorithm", algorithm])
    facts = server.server_facts(line, describe(config), "fa3", True)
    assert (facts.num_steps, facts.topk, facts.num_draft_tokens) == tuple(chosen)


def test_breadth_of_ngram_trees(parser: argparse.ArgumentParser) -> None:
    assert parser.get_default("speculative_ngram_max_bfs_breadth") == draft._NGRAM_BREADTH


def test_steps_that_an_adaptive_server_starts_with() -> None:
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    assert tuple(resolve_candidate_steps_from_config()) == draft._ADAPTIVE_STEPS


def test_steps_from_a_file(tmp_path: Path) -> None:
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"1": {"candidate_steps": [2, 4, 9]}, "8": {"candidate_steps": [0, 2]}, "ema_alpha": 0.2}))
    assert draft._candidates(str(path)) == tuple(resolve_candidate_steps_from_config(str(path))) == (0, 2, 4, 9)


def test_targets_with_several_draft_layers() -> None:
    """By the text of SGLang's rules for models: those of one architecture, and those of all whose name holds some word."""
    from sglang.srt.arg_groups import overrides

    def layered(rule: Any) -> bool:
        return '["enable_multi_layer_eagle"] = True' in inspect.getsource(rule)

    by_name = {name for name, rules in overrides._MODEL_OVERRIDE_FNS.items() if any(map(layered, rules))}
    by_word = [applies for applies, rule in overrides._PREDICATE_OVERRIDE_FNS if layered(rule)]
    assert by_name <= set(draft._MULTI_LAYER)
    assert all(name in by_name or any(applies(name) for applies in by_word) for name in draft._MULTI_LAYER)
    assert all(any(applies(name) for name in draft._MULTI_LAYER) for applies in by_word)


@pytest.mark.parametrize("given", ["EAGLE", "NEXTN", "EAGLE3", "STANDALONE", "eagle"])
@pytest.mark.parametrize("architecture", [*draft._FROZEN_KV_DRAFTS, "LlamaForCausalLMEagle3"])
def test_drafts_that_change_the_algorithm(given: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups.speculative_hook import _resolve_speculative_algorithm_alias
    from sglang.srt.utils import hf_transformers_utils

    def config(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(architectures=[architecture])

    monkeypatch.setattr(hf_transformers_utils, "get_config", config)
    line = options.parse(["--speculative-algorithm", given])
    try:
        wanted = _resolve_speculative_algorithm_alias(given.upper(), "draft")
    except ValueError:
        with pytest.raises(SpecverifyError, match=f"EAGLE3 came with the draft {architecture}"):
            draft.resolved_algorithm(line, {"architectures": [architecture]})
    else:
        assert draft.resolved_algorithm(line, {"architectures": [architecture]}) == wanted


_ROPES: dict[str, Config] = {
    "none": {},
    "null": {"rope_scaling": None},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, by its new name": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "a factor that is no whole number": {"rope_scaling": {"type": "linear", "factor": 1.3}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "default": {"rope_scaling": {"rope_type": "default", "factor": 3.0}},
    "no factor": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, by its old name": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, with its origin": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    "linear, with its origin": {"rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 1024}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "longrope": {"rope_scaling": {"rope_type": "longrope", "factor": 8.0, "short_factor": [1.0], "long_factor": [1.0]}},
    "parameters": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "both": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "by kind of layer": {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}},
    "seq_length": {"seq_length": 999},
    "two keys": {"max_seq_len": 333, "max_sequence_length": 500},
    "model_max_length, stretched": {"model_max_length": 777, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "a key that is null": {"seq_length": None},
}


@pytest.mark.parametrize("rope", _ROPES)
def test_context(rope: str) -> None:
    from sglang.srt.utils.hf_transformers.common import get_context_length
    from transformers import AutoConfig

    config = {**QWEN3_8B, "max_position_embeddings": 4096, **_ROPES[rope]}
    # transformers writes into the rope that it is given.
    seen = AutoConfig.for_model(**copy.deepcopy(config))
    assert describe(config).context == get_context_length(seen)


def test_context_of_a_config_with_keys_of_its_own() -> None:
    from sglang.srt.utils.hf_transformers.common import get_context_length
    from transformers import GPT2Config

    config = GPT2Config(n_positions=512, architectures=["GPT2LMHeadModel"])
    assert describe(config.to_dict()).context == get_context_length(config) == 512


@pytest.mark.parametrize(
    ("facts", "family"),
    [
        ({"is_cuda": True, "is_sm90": True, "device_sm": 90}, "sm90"),
        ({"is_cuda": True, "is_sm90": False, "is_sm100": True}, "sm100"),
        ({"is_cuda": True, "is_sm90": False, "is_sm100": True, "device_sm": 103}, "sm103"),
        ({"is_cuda": True, "is_sm90": False, "is_sm100": True, "device_sm": 107}, "sm107"),
        ({"is_cuda": False, "is_hip": True, "device_sm": 94}, "gfx942"),
        ({"is_cuda": False, "is_hip": True, "device_sm": 95}, "gfx95x"),
        ({"is_cuda": False, "is_hip": False, "is_sm90": False, "device_sm": 0}, "none"),
    ],
    ids=str,
)
def test_overridden_platform_facts(facts: dict[str, Any], family: str) -> None:
    from sglang.srt.runtime_context import get_platform, override_platform

    with override_platform(**facts):
        assert from_sglang_platform(get_platform()).family == family
