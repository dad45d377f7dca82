"""Real servers: greedy tokens through the plugin equal SGLang's own without speculation, and the comparison can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from sglang_specverify import __version__
from sglang_specverify.demo import models
from sglang_specverify.demo.server import Server
from tests.parity import ask
from tests.parity.cover import ALGORITHMS, CASES, DTYPES, IN_PROCESS, PAGE_SIZES, SHAPES, Case
from tests.parity.probe import DRAFT_FAULT, VERIFY_FAULTS
from tests.parity.servers import Farm, Probed, environment, write_plugin

pytestmark = pytest.mark.server

#: Accept length that a right verify and a right draft reach at least, by algorithm and shape; what is measured lies above.
#: The `copy` draft is the target itself, so a chain of 3 steps is accepted whole but for its last step and the first tokens.
LEAST_ACCEPT_LENGTH = {
    ("STANDALONE", "tree"): 2.5,
    ("STANDALONE", "chain"): 3.0,
    ("EAGLE", "tree"): 2.2,
    ("EAGLE", "chain"): 1.3,
    ("EAGLE3", "tree"): 2.2,
    ("EAGLE3", "chain"): 1.3,
    ("NGRAM", "tree"): 1.2,
    ("NGRAM", "chain"): 1.1,
}

#: The server that is asked for its metrics too.
METERED = CASES[-1]


def baseline_name(dtype: str) -> str:
    return f"baseline-{dtype}"


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    root = tmp_path_factory.mktemp("parity")
    probe = write_plugin(root, "specverify_parity_probe", Path(__file__).with_name("probe.py"))

    def model(kind: str, dtype: str) -> str:
        directory = root / f"{kind}-{dtype}"
        if not directory.exists():
            models.build(kind, directory, dtype)
        return str(directory)

    def baseline(dtype: str) -> Probed:
        arguments = ["--model-path", model("target", dtype), "--dtype", dtype]
        server = Server(arguments, stock=True, environment=environment(), log=root / f"{baseline_name(dtype)}.log")
        return Probed(server, None)

    def speculative(case: Case) -> Probed:
        directory = root / case.name
        directory.mkdir()
        draft = None if case.draft is None else model(case.draft, case.dtype)
        metrics = ["--enable-metrics"] if case is METERED else []
        server = Server(
            ["--model-path", model("target", case.dtype), *case.arguments(draft), *metrics],
            environment=environment(probe, PARITY_PROBE=str(directory)),
            log=root / f"{case.name}.log",
        )
        return Probed(server, directory)

    makers = {baseline_name(dtype): partial(baseline, dtype) for dtype in DTYPES}
    farm = Farm(makers | {case.name: partial(speculative, case) for case in CASES})
    yield farm
    farm.stop()


@pytest.fixture(scope="module")
def truth(farm: Farm) -> dict[str, list[ask.Answer]]:
    """SGLang's own greedy tokens without speculation, one request at a time, with the margins between the two best."""
    answers = {}
    for dtype in DTYPES:
        server = farm.get(baseline_name(dtype)).server
        answers[dtype] = [ask.generate(server, ids, margins=True) for ids in ask.prompts()]
        farm.done(baseline_name(dtype))
    return answers


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def served(request: pytest.FixtureRequest, farm: Farm) -> Iterator[tuple[Case, Probed]]:
    case: Case = request.param
    yield case, farm.get(case.name)
    farm.done(case.name)


def test_output_is_worth_comparing(truth: dict[str, list[ask.Answer]]) -> None:
    for answers in truth.values():
        assert all(len(set(answer.tokens)) >= 8 for answer in answers)
        assert len({tuple(answer.tokens) for answer in answers}) == len(answers)


def test_greedy_tokens_equal_the_non_speculative_run(
    served: tuple[Case, Probed], truth: dict[str, list[ask.Answer]], record_property: pytest.RecordProperty
) -> None:
    case, probed = served
    server, noise, want = probed.server, ask.NOISE[case.dtype], truth[case.dtype]
    prompts = ask.prompts()
    result = ask.Comparison()

    result.add(ask.generate(server, prompts[1]), want[1], noise)  # alone
    for got, wanted in zip(ask.generate_all(server, prompts), want, strict=True):  # several, of different lengths
        result.add(got, wanted, noise)

    # One ends early by length, one by a stop token, one is aborted, and their neighbours do not notice.
    stop = want[3].tokens[6]
    first_stop = want[3].tokens.index(stop)
    with ThreadPoolExecutor(4) as pool:
        short = pool.submit(ask.generate, server, prompts[2], max_new_tokens=5)
        # SGLang looks at no stop token where it is to ignore the end.
        stopped = pool.submit(ask.generate, server, prompts[3], stop_token_ids=[stop], ignore_eos=False)
        aborted = pool.submit(ask.abort_in_flight, server, prompts[4])
        whole = pool.submit(ask.generate, server, prompts[5])
        result.add(short.result(), want[2], noise, length=5)
        result.add(stopped.result(), want[3], noise, length=first_stop + 1)
        result.add(whole.result(), want[5], noise)
        assert 2 <= aborted.result() < 400

    # Once more, now from the prefix cache, and after the abort.
    again = ask.generate_all(server, prompts)
    for got, wanted in zip(again, want, strict=True):
        result.add(got, wanted, noise)

    paths = probed.paths()
    lengths = [answer.meta["spec_accept_length"] for answer in again]
    accept_length = sum(lengths) / len(lengths)
    record_property("parity", json.dumps({"case": case.name, **vars(result), "accept_length": accept_length}))
    print(f"{case.name}: {result}, accept length {accept_length:.2f}, verify rows {len(paths)}")

    assert result.differences == 0
    # A run counts only if it compared: at most one run in four may have stopped at a margin below the noise.
    assert result.undecided <= 4 and result.compared >= 10 * ask.NEW_TOKENS
    assert accept_length >= LEAST_ACCEPT_LENGTH[case.algorithm, case.shape]
    assert any(len(path) >= 2 for path in paths), "no draft was accepted at depth 2"
    if case.shape == "tree":
        assert any(ordinal > 0 for path in paths for ordinal in path[1:]), "no accepted branch but the first at depth 2"

    kernels = {(row["part"], row["mode"]): row["kernel"] for row in probed.routes() if row["calls"]}
    assert kernels["target", "target_verify"] == "reference"
    if case.algorithm != "NGRAM":
        assert kernels["draft decode", "draft_decode"] == "reference"
        assert kernels["draft extend", "draft_extend"] == "reference"

    if case is METERED:
        text = server.get("/metrics")
        assert f'sglang:specverify_info{{base="triton",hardware="no GPU",version="{__version__}"}} 1.0' in text
    if case is CASES[0]:
        _verify_faults_are_seen(probed, prompts, want, noise)
    if case.key[:2] == ("EAGLE3", "chain"):  # its head knows a token only through the key of its own position
        _draft_fault_is_seen(probed, prompts, want, noise, accept_length)


def _broken_run(
    probed: Probed, fault: str, prompts: list[list[int]], want: list[ask.Answer], noise: float
) -> tuple[ask.Comparison, float]:
    """The comparison above, on a server that is broken in one way; its accept length beside it."""
    probed.inject(fault)
    result = ask.Comparison()
    answers = ask.generate_all(probed.server, prompts)
    for got, wanted in zip(answers, want, strict=True):
        result.add(got, wanted, noise)
    return result, sum(answer.meta["spec_accept_length"] for answer in answers) / len(answers)


def _verify_faults_are_seen(probed: Probed, prompts: list[list[int]], want: list[ask.Answer], noise: float) -> None:
    for fault in VERIFY_FAULTS:
        result, _ = _broken_run(probed, fault, prompts, want, noise)
        assert result.differences >= 2, f"{fault} passed: {result}"
    result, _ = _broken_run(probed, "", prompts, want, noise)
    assert result.differences == 0, "the server did not recover from the injected faults"


def _draft_fault_is_seen(
    probed: Probed, prompts: list[list[int]], want: list[ask.Answer], noise: float, accept_length: float
) -> None:
    result, broken = _broken_run(probed, DRAFT_FAULT, prompts, want, noise)
    assert result.differences == 0, "a wrong draft must not cost a token"
    assert broken < accept_length - 0.2, f"{DRAFT_FAULT}: accept length {broken} against {accept_length}"


def test_servers_and_process_tests_cover_every_pair() -> None:
    """Every pair of values of two factors runs somewhere: on one of at most 8 servers, or in one process."""

    assert len(CASES) <= 8
    factors = (ALGORITHMS, SHAPES, PAGE_SIZES, DTYPES)
    covered = {case.key for case in CASES} | set(IN_PROCESS)
    for i in range(len(factors)):
        for j in range(i + 1, len(factors)):
            pairs = {(key[i], key[j]) for key in covered}
            wanted = {(a, b) for a in factors[i] for b in factors[j]}
            assert wanted <= pairs, f"no run has {sorted(wanted - pairs, key=str)}"
