"""A server described by its command line alone. Pure; reads the options that a route or a base depends on.

Every other option is accepted and left alone: SGLang has hundreds, and checks them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_specverify import flags
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing.facts import LayerKind, ServerFacts, algorithm_name
from sglang_specverify.routing.model import Description

#: Spellings of one option, the first of them its name here.
_VALUES = (
    ("--model-path", "--model"),
    ("--attention-backend",),
    ("--prefill-attention-backend",),
    ("--decode-attention-backend",),
    ("--speculative-draft-attention-backend",),
    ("--speculative-draft-model-path", "--speculative-draft-model"),
    ("--speculative-attention-mode",),
    ("--speculative-algorithm", "--speculative-algo"),
    ("--device",),
    ("--dtype",),
    ("--kv-cache-dtype",),
    ("--cuda-graph-backend-decode",),
    ("--dllm-algorithm",),
    ("--dsv4-attn-backend",),
    ("--dsv4-prefill-backend",),
    ("--config",),
)
_INTEGERS = (
    ("--page-size",),
    ("--context-length",),
    ("--max-running-requests",),
    ("--tp-size", "--tensor-parallel-size", "--tp"),
    ("--dp-size", "--data-parallel-size", "--dp"),
    ("--attn-dp-size", "--attention-data-parallel-size"),
    ("--dcp-size", "--decode-context-parallel-size"),
    ("--attn-cp-size", "--attention-context-parallel-size"),
    ("--speculative-eagle-topk",),
    ("--speculative-num-steps",),
    ("--speculative-num-draft-tokens",),
    ("--speculative-dflash-block-size",),
    ("--speculative-ngram-max-bfs-breadth",),
)
_SWITCHES = (
    "--disable-cuda-graph",
    "--disable-decode-cuda-graph",
    "--enable-deterministic-inference",
    "--enable-two-batch-overlap",
    "--enable-dp-attention",
    "--enable-kv-cache-sharding",
    "--enable-unified-memory",
    "--enable-page-major-kv-layout",
    "--enable-pdmux",
)
#: What is in force with an option that no route knows, in the words of the running backends.
_STATES = {
    "--enable-kv-cache-sharding": "KV cache sharding",
    "--enable-unified-memory": "unified memory pool",
    "--enable-page-major-kv-layout": "cache pool PageMajorMHATokenToKVPool",
    "--enable-pdmux": "prefill-decode multiplexing",
}
#: SGLang's own choice where the line gives no number of steps: (steps, topk, draft tokens).
_AUTO_TREE = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
_NGRAM_BREADTH, _NGRAM_DRAFT_TOKENS = 10, 12


@dataclass(frozen=True)
class ServerLine:
    """The options that matter, by their first spelling; an absent one is absent here too."""

    values: dict[str, str]
    integers: dict[str, int]
    switches: frozenset[str]

    @property
    def backends(self) -> tuple[str | None, str | None, str | None, str | None]:
        """The names for attention, prefill, decode and draft, as given."""
        get = self.values.get
        return (
            get("--attention-backend"),
            get("--prefill-attention-backend"),
            get("--decode-attention-backend"),
            get("--speculative-draft-attention-backend"),
        )

    @property
    def mode(self) -> str:
        return self.values.get("--speculative-attention-mode", "prefill")

    @property
    def algorithm(self) -> str | None:
        return algorithm_name(self.values.get("--speculative-algorithm"))

    @property
    def attention_ranks(self) -> int:
        """Ranks that share the attention heads: tensor parallelism less data and context parallelism inside it."""
        tp, dp = self.integers.get("--tp-size", 1), self.integers.get("--attn-dp-size", 1)
        if "--enable-dp-attention" in self.switches:
            dp = self.integers.get("--dp-size", 1)
        ranks = dp * self.integers.get("--attn-cp-size", 1)
        if tp % ranks:
            raise SpecverifyError(
                f"--tp-size {tp} does not divide by the {ranks} ranks of attention data and context parallelism",
                "choose sizes that divide",
            )
        return tp // ranks


def names_option(argument: str, spelling: str) -> bool:
    """Whether `argument` gives the option `spelling`, as `--option` or as `--option=value`."""
    return argument == spelling or argument.startswith(f"{spelling}=")


def parse(arguments: Sequence[str]) -> ServerLine:
    """Read an SGLang server's arguments.

    Raises:
        SpecverifyError: an option without its value, or a number that is none.
    """
    values: dict[str, str] = {}
    for spellings in (*_VALUES, *_INTEGERS):
        found = [value for spelling in spellings for value in _given(arguments, spelling)]
        if found:
            values[spellings[0]] = found[-1]
    integers = {names[0]: _positive(names[0], values.pop(names[0])) for names in _INTEGERS if names[0] in values}
    return ServerLine(values, integers, frozenset(name for name in _SWITCHES if name in arguments))


def _given(arguments: Sequence[str], spelling: str) -> list[str]:
    found = []
    for place, argument in enumerate(arguments):
        if argument == spelling:
            if place + 1 == len(arguments) or arguments[place + 1].startswith("--"):
                raise SpecverifyError(f"{spelling} came without a value", f"write {spelling} VALUE")
            found.append(arguments[place + 1])
        elif argument.startswith(f"{spelling}="):
            found.append(argument.partition("=")[2])
    return found


def _positive(option: str, value: str) -> int:
    if value.isdecimal() and int(value) > 0:
        return int(value)
    raise SpecverifyError(f"{option} {value} is no positive whole number", f"give {option} a number from 1")


def server_facts(line: ServerLine, model: Description, base: str, has_gpu: bool) -> ServerFacts:
    """What the line means for `model`, with SGLang's own defaults where it says nothing.

    Args:
        base: the backend underneath; "" while it is being chosen.
        has_gpu: CUDA graphs exist only there.
    """
    topk, steps, draft_tokens = _tree(line, model.architectures[0])
    unified = _unified(model)
    graphs = not {"--disable-cuda-graph", "--disable-decode-cuda-graph"} & line.switches
    return ServerFacts(
        base=base,
        algorithm=line.algorithm,
        topk=topk,
        num_steps=steps,
        num_draft_tokens=draft_tokens,
        page_size=line.integers.get("--page-size", 1),
        dtype=_dtype(line.values.get("--dtype", "auto"), model),
        kv_cache_dtype=line.values.get("--kv-cache-dtype", "auto"),
        cuda_graph=has_gpu and graphs and line.values.get("--cuda-graph-backend-decode") != "disabled",
        deterministic="--enable-deterministic-inference" in line.switches,
        context=line.integers.get("--context-length", model.context),
        requests=line.integers.get("--max-running-requests", 0),
        splitkv_verify=flags.switch("SGLANG_ENABLE_SPLITKV_VERIFY"),
        unified=unified,
        unified_verify=unified and flags.switch("SGLANG_AITER_UNIFIED_VERIFY"),
        unknown=frozenset(_states(line)) | model.states,
        two_batch_overlap="--enable-two-batch-overlap" in line.switches,
        plan_stream=flags.switch("SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
    )


def _unified(model: Description) -> bool:
    """Whether SGLang's aiter backend would use its unified attention: where asked, and over a pool for window layers alone.

    SGLang has a list of architectures that get such a pool; here a model with window layers beside full ones counts as one.
    """
    kinds = {group.facts.kind for group in model.groups}
    return not model.facts.is_mla and (
        flags.switch("SGLANG_USE_AITER_UNIFIED_ATTN") or {LayerKind.FULL, LayerKind.WINDOW} <= kinds
    )


def _tree(line: ServerLine, architecture: str) -> tuple[int, int, int]:
    """(topk, steps, draft tokens) as SGLang resolves them."""
    get, algorithm = line.integers.get, line.algorithm
    if algorithm is None:
        return 1, 0, 0
    tokens = get("--speculative-num-draft-tokens") or get("--speculative-dflash-block-size")
    if algorithm == "NGRAM":
        topk, tokens = get("--speculative-ngram-max-bfs-breadth", _NGRAM_BREADTH), tokens or _NGRAM_DRAFT_TOKENS
        return topk, get("--speculative-num-steps", tokens // topk), tokens
    if algorithm in ("DFLASH", "DSPARK"):
        return 1, 1, tokens or 0
    steps = get("--speculative-num-steps")
    if steps is None:
        tree = algorithm != "STANDALONE" and architecture in _AUTO_TREE
        return (4, 5, 8) if tree else (1, 3, 4)
    topk = get("--speculative-eagle-topk", 1)
    # A chain has no choice: SGLang sets its length to the steps and the root.
    return topk, steps, steps + 1 if topk == 1 else tokens or 0


def _dtype(given: str, model: Description) -> str:
    name = {"half": "float16", "float": "float32"}.get(given, given)
    if name != "auto":
        return name
    if model.dtype == "float32":
        # SGLang's rule for "auto": no float32 on a server unless asked for.
        return "bfloat16" if "Gemma" in model.architectures[0] else "float16"
    return model.dtype


def _states(line: ServerLine) -> list[str]:
    found = [state for switch, state in _STATES.items() if switch in line.switches]
    if line.integers.get("--dcp-size", 1) > 1:
        found.append("decode context parallelism")
    if line.integers.get("--attn-cp-size", 1) > 1:
        found.append("prefill context parallelism")
    if "--dllm-algorithm" in line.values:
        found.append("diffusion language model")
    return found
