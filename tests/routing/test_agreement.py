"""What is said of SGLang from outside is what the installed SGLang says of itself."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from sglang_specverify.cli.serve import _WITHOUT_GPU
from sglang_specverify.hardware import from_sglang_platform
from sglang_specverify.routing import server
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
    valued = [spelling for names in (*server._VALUES, *server._INTEGERS) for spelling in names]
    filled = [option[0] for option, _ in _WITHOUT_GPU]
    for spelling in (*valued, *server._SWITCHES, *filled):
        # SGLang's parser also takes what abbreviates exactly one option.
        known = [option for option in parser._option_string_actions if option.startswith(spelling)]
        assert known, spelling


def test_switches_take_no_value_and_the_others_do(parser: argparse.ArgumentParser) -> None:
    for switch in server._SWITCHES:
        assert parser._option_string_actions[switch].nargs == 0, switch
    for names in (*server._VALUES, *server._INTEGERS):
        assert parser._option_string_actions[names[0]].nargs != 0, names[0]


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
    line = server.parse(["--speculative-algorithm", algorithm])
    facts = server.server_facts(line, describe(config), "fa3", True)
    assert (facts.num_steps, facts.topk, facts.num_draft_tokens) == tuple(chosen)


def test_breadth_of_ngram_trees(parser: argparse.ArgumentParser) -> None:
    assert parser.get_default("speculative_ngram_max_bfs_breadth") == server._NGRAM_BREADTH


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
