"""`specverify explain` for models of real shapes on every kind of hardware, against a snapshot that is read by people.

`python -m tests.cli.test_explain` writes the snapshot anew; read the difference before committing it.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from sglang_specverify.cli.describe import explain
from sglang_specverify.cli.explain import layers_text
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.flags import Flags
from sglang_specverify.hardware import from_name
from tests.cli.conftest import Run
from tests.routing.configs import DEEPSEEK_V3, GPT_OSS_20B, MODELS, NAMED, QWEN3_5, QWEN3_8B, Config

_ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("explain.txt")
HARDWARE = ("sm_90", "sm_100", "sm_103", "sm_107", "gfx942", "gfx950", "none")
LINES = {
    "tree": "--speculative-algorithm EAGLE3 --speculative-num-steps 8 --speculative-eagle-topk 16 "
    "--speculative-num-draft-tokens 64",
    "tree on pages": "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 8 --page-size 16",
    "chain, FP8": "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --kv-cache-dtype fp8_e4m3",
    "none": "",
}
AITER = frozenset({"aiter"})


def _snapshot(directory: Path) -> str:
    """The base for every line; the routes and their reasons for the tree, once for all modes that say the same."""
    text = []
    for name, config in NAMED.items():
        path = directory / f"{name}.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        for hardware in HARDWARE:
            found = {
                title: explain(str(path), from_name(hardware), ["--tp-size", "2", *line.split()], Flags(), AITER)
                for title, line in LINES.items()
            }
            text.append(f"{name} on {hardware}")
            for title, one in found.items():
                text.append(f"  {title}: {one.base.base}, page size {one.server.page_size}: {one.base.reason}")
            routes: dict[str, list[str]] = {}
            for row in found["tree"].rows:
                said = f"{layers_text(row)}: {row.decision.kernel}: {row.decision.reason}"
                routes.setdefault(said, []).append(row.mode.value)
            text += [f"  {' + '.join(modes)}: {said}" for said, modes in routes.items()]
    return "\n".join(text) + "\n"


def test_the_snapshot(tmp_path: Path) -> None:
    assert _snapshot(tmp_path).splitlines() == SNAPSHOT.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def model(tmp_path: Path) -> Any:
    def write(config: Config, name: str = "model") -> str:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(directory)

    return write


def ask(path: str, hardware: str, line: str = "", **flags: Any) -> Any:
    return explain(path, from_name(hardware), line.split(), Flags(**flags), AITER)


@pytest.mark.parametrize(
    ("config", "hardware", "line", "base"),
    [
        (QWEN3_8B, "sm_90", "tree on pages", "fa3"),
        (QWEN3_8B, "sm_100", "tree on pages", "triton"),
        (QWEN3_8B, "sm_100", "tree", "fa4"),
        (QWEN3_5, "sm_90", "tree", "fa3"),
        (QWEN3_5, "sm_103", "tree", "triton"),
        (GPT_OSS_20B, "gfx950", "chain, FP8", "aiter"),
        (DEEPSEEK_V3, "gfx942", "tree on pages", "triton"),
        (QWEN3_8B, "none", "tree on pages", "triton"),
    ],
)
def test_bases(model: Any, config: Config, hardware: str, line: str, base: str) -> None:
    assert ask(model(config), hardware, LINES[line]).base.base == base


def test_modes_follow_the_algorithm(model: Any) -> None:
    path = model(QWEN3_8B)

    def modes(line: str) -> list[str]:
        return [row.mode.value for row in ask(path, "sm_90", line).rows]

    assert modes("") == ["prefill", "decode"]
    assert modes("--speculative-algorithm NGRAM") == ["target_verify", "prefill", "decode"]
    assert modes("--speculative-algorithm EAGLE") == ["target_verify", "draft_decode", "draft_extend", "prefill", "decode"]


def test_the_draft_is_described_from_its_own_config(model: Any) -> None:
    draft = {**QWEN3_8B, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "num_attention_heads": 16}
    line = "--speculative-algorithm EAGLE3 --speculative-draft-model-path"
    rows = ask(model(GPT_OSS_20B), "sm_90", f"{line} {model(draft, 'draft')}").rows
    found = {(row.mode.value, row.model, row.layers.facts.q_heads, row.layers.count) for row in rows if row.model == "draft"}
    assert found == {("draft_decode", "draft", 16, 1), ("draft_extend", "draft", 16, 1)}
    elsewhere = ask(model(GPT_OSS_20B), "sm_90", f"{line} somebody/on-the-hub")
    assert any("draft's config.json is not at hand" in note for note in elsewhere.notes)


def test_a_mode_that_another_backend_runs(model: Any) -> None:
    line = "--speculative-algorithm EAGLE --attention-backend triton --speculative-draft-attention-backend specverify"
    rows = {row.mode.value: row.decision for row in ask(model(QWEN3_8B), "none", line).rows}
    assert rows["draft_decode"].served
    assert rows["draft_extend"].served
    for mode in ("target_verify", "prefill", "decode"):
        assert not rows[mode].served
        assert rows[mode].reason == "the server line gives this mode to triton, not to the plugin"


def test_a_server_that_strict_mode_refuses(model: Any) -> None:
    path = model(QWEN3_5)
    tree = LINES["tree"]
    assert "it has no launch table for sm_120" in ask(path, "sm_120", tree, strict=True).refused
    assert ask(path, "sm_120", tree).refused == ask(path, "sm_90", tree, strict=True).refused == ""
    assert ask(path, "none", tree, strict=True).refused == ""


def test_cpu_server_on_a_gpu_machine(model: Any) -> None:
    found = ask(model(QWEN3_8B), "sm_90", "--device cpu")
    assert (found.hardware.family, found.base.base) == ("none", "triton")
    assert all(row.decision.kernel == "reference" for row in found.rows)


def test_page_size_that_sglang_sets_itself(model: Any) -> None:
    found = ask(model(QWEN3_8B), "sm_100")
    assert found.server.page_size == 128
    assert any("page size 128 for fa4" in note for note in found.notes)
    assert ask(model(QWEN3_8B), "sm_100", LINES["tree"]).server.page_size == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--speculative-algorithm NGRAM --page-size 16", "needs page size 1"),
        ("--speculative-algorithm EAGLE --decode-attention-backend specverify", "verify would not reach the plugin"),
        (f"{LINES['tree']} --enable-two-batch-overlap", "two-batch-overlap"),
        ("--use-ray", "Ray actors load no plugin"),
        ("--smg-grpc-mode", "whether they hold the plugin"),
        ("--speculative-algorithm EAGLE --speculative-num-steps 3", "came without --speculative-eagle-topk"),
        ("--tp-size 3", "do not divide over 3"),
        ("--kv-cache-dtype mxfp8", "no base can serve this on SM90"),
    ],
)
def test_lines_that_would_not_start(model: Any, line: str, what: str) -> None:
    with pytest.raises(SpecverifyError, match=what):
        ask(model(QWEN3_8B), "sm_90", line)


def test_prints_a_table(run: Run, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    outcome = run("explain", "--model", model(GPT_OSS_20B), "--hardware", "H200", "--", *LINES["tree"].split())
    assert outcome.code == 0
    assert "GptOssForCausalLM on SM90 (H200)" in outcome.out
    assert "EAGLE3: tree, topk 16, 8 steps, 64 draft tokens, page size 1" in outcome.out
    assert "base fa3: preferred on SM90" in outcome.out
    assert "not aiter: aiter does not run on SM90" in outcome.out
    text = " ".join(outcome.out.replace("│", " ").split())
    assert "12 × sliding window, 64:8 heads, dim 64, window 127, sinks" in text
    for word in ("target_verify", "draft_decode", "draft_extend", "prefill", "decode", "stock"):
        assert word in text


def test_prints_json(run: Run, model: Any) -> None:
    outcome = run("explain", "--json", "--hardware", "none", "--", "--model-path", model(QWEN3_8B), *LINES["tree"].split())
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["base"]["name"] == "triton"
    assert {item["name"] for item in found["base"]["rejected"]} == {"fa3", "fa4", "aiter"}
    assert {route["kernel"] for route in found["routes"]} == {"reference"}
    assert found["routes"][0]["layer"]["kind"] == "full attention"
    assert found["server"]["topk"] == 16


def test_flags_of_this_process_count(run: Run, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_TREE", "0")
    monkeypatch.setenv("SGLANG_SPECVERIFY_BASE", "triton")
    arguments = ("--json", "--model", model(QWEN3_8B), "--hardware", "none", "--", *LINES["tree"].split())
    found = json.loads(run("explain", *arguments).out)
    assert {route["mode"] for route in found["routes"] if route["kernel"] == "stock"} == {"target_verify"}
    monkeypatch.setenv("SGLANG_SPECVERIFY_BASE", "aiter")
    outcome = run("explain", *arguments)
    assert outcome.code == 2
    assert "SGLANG_SPECVERIFY_BASE=aiter cannot serve here: aiter needs a GPU" in outcome.err


@pytest.mark.parametrize(("option", "base"), [((), "aiter"), (("--aiter",), "aiter"), (("--no-aiter",), "triton")])
def test_aiter_can_be_counted_in_or_out(run: Run, model: Any, option: tuple[str, ...], base: str) -> None:
    outcome = run("explain", "--json", *option, "--model", model(QWEN3_8B), "--hardware", "MI355X")
    assert json.loads(outcome.out)["base"]["name"] == base


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no model was named"),
        (("--model", "somebody/on-the-hub"), "no config.json at somebody/on-the-hub"),
        (("--hardware", "abacus"), "'abacus' is no hardware"),
        (("--", "--page-size", "x"), "--page-size x is no positive whole number"),
    ],
    ids=str,
)
def test_bad_input(run: Run, arguments: tuple[str, ...], says: str) -> None:
    hardware = () if "--hardware" in arguments else ("--hardware", "sm_90")
    outcome = run("explain", *hardware, *arguments)
    assert outcome.code == 2
    assert says in outcome.err


def _documented() -> list[str]:
    """The commands of README and docs, as a shell joins their lines."""
    pages = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").replace("\\\n", "").splitlines()]
    return [line.strip().partition(" #")[0] for line in lines if line.strip().startswith("specverify explain -")]


@pytest.mark.parametrize("command", _documented())
def test_documented_commands(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(_ROOT)
    outcome = run(*shlex.split(command)[1:])
    assert outcome.code == 0, outcome.err


def test_there_are_documented_commands() -> None:
    assert len(_documented()) >= 2


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        SNAPSHOT.write_text(_snapshot(Path(scratch)), encoding="utf-8")


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("hardware", ["H200", "B200", "gfx950", "none"])
def test_the_models_that_come_along(path: Path, hardware: str, run: Run) -> None:
    outcome = run("explain", "--model", str(path), "--hardware", hardware, "--", "--attention-backend", "specverify")
    assert outcome.code == 0, outcome.err
    assert from_name(hardware).display in outcome.out
