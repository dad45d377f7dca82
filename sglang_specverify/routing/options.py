"""SGLang's command line, as far as a route, a base or `specverify serve` depends on it, read as SGLang's own parser reads it.

Every other option is accepted and left alone: SGLang has hundreds, and checks them itself. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from sglang_specverify.errors import SpecverifyError
from sglang_specverify.routing.facts import algorithm_name

# Spellings of one option, the first of them its name here. SGLang's parser also takes every beginning that no other option has:
# what stands in brackets may be cut short or left off. Where one supported SGLang takes less than another, this takes more: the
# other refuses the line itself.
VALUES = (
    ("--model-p[ath]", "--model"),
    ("--attention-b[ackend]",),
    ("--prefill-a[ttention-backend]",),
    ("--decode-a[ttention-backend]",),
    ("--speculative-draft-a[ttention-backend]",),
    ("--speculative-draft-model-p[ath]", "--speculative-draft-model"),
    ("--speculative-at[tention-mode]",),
    ("--speculative-al[gorithm]",),
    ("--dev[ice]",),
    ("--dt[ype]",),
    ("--kv-cac[he-dtype]",),
    ("--cuda-graph-backend-d[ecode]",),
    ("--dllm-algorithm",),
    ("--dsv4-a[ttn-backend]",),
    ("--dsv4-p[refill-backend]",),
    ("--rl-o[n-policy-target]",),
    ("--speculative-adaptive-[config]",),
    ("--mem[-fraction-static]",),
    ("--max-t[otal-tokens]",),
    ("--cuda-graph-c[onfig]",),
    ("--cuda-graph-backend-p[refill]",),
    ("--config",),
)
INTEGERS = (
    ("--pa[ge-size]",),
    ("--context-l[ength]",),
    ("--max-r[unning-requests]",),
    ("--tp[-size]", "--te[nsor-parallel-size]"),
    ("--dp[-size]", "--da[ta-parallel-size]"),
    ("--attn-d[p-size]", "--attention-d[ata-parallel-size]"),
    ("--dcp-s[ize]", "--decode-c[ontext-parallel-size]"),
    ("--attn-c[p-size]", "--attention-c[ontext-parallel-size]"),
    ("--speculative-ea[gle-topk]",),
    ("--speculative-num-s[teps]",),
    ("--speculative-num-d[raft-tokens]",),
    ("--speculative-df[lash-block-size]",),
    ("--speculative-ngram-max-b[fs-breadth]",),
)
SWITCHES = (
    "--disable-cuda-graph",
    "--disable-d[ecode-cuda-graph]",
    "--enable-det[erministic-inference]",
    "--enable-tw[o-batch-overlap]",
    "--enable-dp-attention",
    "--enable-k[v-cache-sharding]",
    "--enable-unified-m[emory]",
    "--enable-pa[ge-major-kv-layout]",
    "--enable-pdm[ux]",
    "--enable-multi-[layer-eagle]",
    "--speculative-adaptive",
    "--us[e-ray]",
    "--grpc-m[ode]",
    "--smg-g[rpc-mode]",
    "--sl[eep-on-idle]",
    "--enable-torch-compile",
)

#: Numbers that SGLang takes as 128k or 128Ki too, and numbers that mean something at 0.
_SCALED = ("--context-length",)
_FROM_ZERO = ("--speculative-num-steps", "--speculative-num-draft-tokens")
_SCALES = {
    **{suffix: 1000**power for power, suffix in enumerate(("", "k", "M", "G", "T"))},
    **{suffix: 1024**power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti"), start=1)},
}


def _full(spelling: str) -> str:
    return spelling.replace("[", "").replace("]", "")


#: (shortest spelling, full spelling, name here).
_SPELLINGS = tuple(
    (spelling.partition("[")[0], _full(spelling), _full(spellings[0]))
    for spellings in (*VALUES, *INTEGERS, *((switch,) for switch in SWITCHES))
    for spelling in spellings
)
_SWITCH_NAMES = frozenset(map(_full, SWITCHES))
_INTEGER_NAMES = tuple(_full(spellings[0]) for spellings in INTEGERS)


@dataclass(frozen=True)
class ServerLine:
    """The options that matter, by their first spelling; an absent one is absent here too."""

    values: dict[str, str]
    integers: dict[str, int]
    switches: frozenset[str]

    @property
    def named(self) -> frozenset[str]:
        """The options that the line gives."""
        return frozenset({*self.values, *self.integers, *self.switches})

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
        """The algorithm that the line names; `draft.resolved_algorithm` knows what becomes of it."""
        return algorithm_name(self.values.get("--speculative-algorithm"))

    @property
    def attention_dp(self) -> int:
        """Groups of ranks that attend to requests of their own."""
        groups = self.integers.get("--attn-dp-size", 1)
        return self.integers.get("--dp-size", 1) if groups == 1 and "--enable-dp-attention" in self.switches else groups

    @property
    def attention_ranks(self) -> int:
        """Ranks that share the attention heads: tensor parallelism less data and context parallelism inside it."""
        tp, ranks = self.integers.get("--tp-size", 1), self.attention_dp * self.integers.get("--attn-cp-size", 1)
        if tp % ranks:
            raise SpecverifyError(
                f"--tp-size {tp} does not divide by the {ranks} ranks of attention data and context parallelism",
                "choose sizes that divide",
            )
        return tp // ranks


def option_of(argument: str) -> str | None:
    """The name here of the option that `argument` gives, as `--option`, as `--option=value` or cut short; None for any other."""
    word = argument.partition("=")[0]
    return next((name for least, full, name in _SPELLINGS if word.startswith(least) and full.startswith(word)), None)


def parse(arguments: Sequence[str]) -> ServerLine:
    """Read an SGLang server's arguments. Of an option that comes twice the last one counts.

    Raises:
        SpecverifyError: an option without its value, or a number that is none.
    """
    values: dict[str, str] = {}
    switches = set()
    for place, argument in enumerate(arguments):
        name = option_of(argument)
        if name is None:
            continue
        _, equals, value = argument.partition("=")
        if name in _SWITCH_NAMES:
            switches.add(name)
        elif equals:
            values[name] = value
        elif place + 1 == len(arguments) or arguments[place + 1].startswith("--"):
            raise SpecverifyError(f"{argument} came without a value", f"write {argument} VALUE")
        else:
            values[name] = arguments[place + 1]
    integers = {name: _number(name, values.pop(name)) for name in _INTEGER_NAMES if name in values}
    return ServerLine(values, integers, frozenset(switches))


def _number(option: str, value: str) -> int:
    least = 0 if option in _FROM_ZERO else 1
    try:
        number = _scaled(value) if option in _SCALED else int(value)
    except ValueError:
        number = -1
    if number >= least:
        return number
    kind = "whole number from 0" if least == 0 else "positive whole number"
    also = ", such as 131072, 128k (128000) or 128Ki (131072)" if option in _SCALED else ""
    raise SpecverifyError(f"{option} {value} is no {kind}", f"give {option} a number from {least}{also}")


def _scaled(value: str) -> int:
    """A number as SGLang's `human_readable_int` reads it: decimals before a power of 1000 alone."""
    found = re.fullmatch(r"(\d+)(\.\d+)?(k|M|G|T|Ki|Mi|Gi|Ti)", value.strip())
    if found is None or (found[2] and found[3].endswith("i")):
        return int(value)
    return int(Decimal(found[1] + (found[2] or "")) * _SCALES[found[3]])
