"""Tiny models, made on the spot, with which a comparison of two greedy runs can fail.

With random weights a draft is almost never accepted, so only the root of a draft tree matters and every mask passes.
These models have a structure that makes the rest of the tree matter:

- the hidden state has a constant dimension, a token part and a context part. The embedding fills the first two; attention
  and MLP write into the context part only;
- the output head is `PRIOR · (token parts of s's two predecessors) + READOUT · r_s`, so that every token t has exactly
  two successors, two permutations without a common value, and a random reading `r` of the context, which is attention over the
  whole prefix, decides between them;
- three heads look 0, 1 and 2 positions back (a constant key, a query turned by that many positions), the others attend
  sharply by content, so a key that is missing, extra or shifted by one may change the choice, near or far;
- a draft that knows the two successors and not the choice covers the truth with topk 2 or more, on a branch that
  the context decides. `mirror` reads the context with the opposite sign: the truth is always its second choice.

Weights are written directly, in the layout of Hugging Face's Llama; nothing is fetched, and equal arguments give equal
files. Importing this module needs torch, safetensors and tokenizers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sglang_specverify.demo import tokenizer
from sglang_specverify.demo.forks import Forks, draw
from sglang_specverify.errors import ArgumentError

KINDS = ("target", "mirror", "copy", "eagle", "eagle3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

HIDDEN, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, MLP = 256, 2, 8, 2, 32, 256
CONTEXT_LENGTH, ROPE_THETA, NORM_EPS = 2048, 10000.0, 1e-6

#: The three parts of the hidden state.
CONSTANT = 0
TOKEN = slice(1, 161)
CONTEXT = slice(161, HIDDEN)

#: Norms of an embedding's constant and token part. With the context part they make a hidden state of RMS about 1.
CONSTANT_SIZE, TOKEN_SIZE = 6.0, 10.0
#: Logit of a successor before the context speaks, and spread of the context's say. Small logits keep bf16 steps small.
PRIOR, READOUT = 7.0, 0.7
#: Share of the target's readout in a draft: below 1 the two successors keep similar scores, so the tree holds both.
DRAFT_SHARE = 0.15

#: RoPE pairs that carry the constant key; they turn fast enough to tell neighbours apart.
_FAST_PAIRS = 4
#: Sharpness of content scores; strength of the constant key; how many heads look back by position.
_CONTENT_SCORE, _LOOK_BACK, _LOOKING_BACK = 8.0, 2.5, 3
_SEED = 26


def forks() -> Forks:
    """The successors that the target's head is built from."""
    return draw(_SEED)


def build(kind: str, directory: str | Path, dtype: str = "float32") -> Path:
    """Write a model directory for SGLang: config.json, model.safetensors and a tokenizer with a chat template.

    Args:
        kind: "target", "copy" (the same weights again), "mirror" (a STANDALONE draft that ranks the truth second),
            "eagle" or "eagle3" (a draft head for the target).
        directory: made if absent; files in it are replaced.
        dtype: "float32", "bfloat16" or "float16": values are made in float32 and rounded once.

    Returns:
        The directory.
    """
    if kind not in KINDS:
        raise ArgumentError("kind", repr(kind), ", ".join(KINDS))
    if dtype not in DTYPES:
        raise ArgumentError("dtype", repr(dtype), ", ".join(DTYPES))
    # Deferred so that a wrong argument is told at once.
    from safetensors.torch import save_file

    makers: dict[str, Callable[[], tuple[dict[str, object], dict[str, Tensor]]]] = {
        "target": lambda: (_config("LlamaForCausalLM", LAYERS), _causal_lm(READOUT)),
        "copy": lambda: (_config("LlamaForCausalLM", LAYERS), _causal_lm(READOUT)),
        "mirror": lambda: (_config("LlamaForCausalLM", LAYERS), _causal_lm(-DRAFT_SHARE * READOUT)),
        "eagle": _eagle,
        "eagle3": _eagle3,
    }
    config, weights = makers[kind]()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config["torch_dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    rounded = {
        name: weight.to(DTYPES[dtype]).contiguous() if weight.is_floating_point() else weight for name, weight in weights.items()
    }
    save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(directory, CONTEXT_LENGTH)
    return directory


def _config(architecture: str, layers: int) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": tokenizer.VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": tokenizer.BOS,
        "eos_token_id": tokenizer.EOS,
    }


class _Random:
    """Named streams of normal numbers, so that adding a weight changes no other."""

    def __init__(self, stream: int) -> None:
        self._generator = torch.Generator().manual_seed(_SEED * 1000 + stream)

    def normal(self, rows: int, columns: int, spread: float) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=self._generator)
        return drawn * spread


def _embedding() -> Tensor:
    """[vocab, hidden]: the constant, a token part, no context. Token parts of live tokens are orthogonal."""
    width = TOKEN.stop - TOKEN.start
    live = tokenizer.printable_ids()
    assert len(live) <= width, "more live tokens than dimensions for them"
    random = _Random(0)
    parts = random.normal(tokenizer.VOCABULARY, width, 1.0)
    parts /= parts.norm(dim=1, keepdim=True)
    parts[live] = torch.linalg.qr(random.normal(width, width, 1.0)).Q[: len(live)]
    table = torch.zeros(tokenizer.VOCABULARY, HIDDEN)
    table[:, CONSTANT] = CONSTANT_SIZE
    table[:, TOKEN] = TOKEN_SIZE * parts
    return table


def _head(share: float) -> Tensor:
    """[vocab, hidden]: each live token's two predecessors, and `share` of a random reading of the context."""
    fork, table = forks(), _embedding()
    head = torch.zeros(tokenizer.VOCABULARY, HIDDEN)
    known = torch.nonzero(fork.first >= 0).flatten()
    for successor in (fork.first, fork.second):
        head[successor[known], TOKEN] += PRIOR / TOKEN_SIZE**2 * table[known, TOKEN]
    live = tokenizer.printable_ids()
    width = CONTEXT.stop - CONTEXT.start
    # About one unit of context per dimension leaves the layers; see `_layer`.
    head[live, CONTEXT] = _Random(1).normal(len(live), width, share / math.sqrt(width))
    return head


def _turned(back: int) -> Tensor:
    """The part [head_dim] of a query that the constant key answers most strongly `back` positions before it."""
    pairs = torch.arange(_FAST_PAIRS)
    angle = -back * ROPE_THETA ** (-2.0 * pairs / HEAD_DIM)
    vector = torch.zeros(HEAD_DIM)
    vector[pairs], vector[pairs + HEAD_DIM // 2] = angle.cos(), angle.sin()
    return vector


def _constant_rows(back: int, strength: float) -> Tensor:
    """[head_dim, 1]: weights on the constant dimension. Two vectors of length 1 a pair score `strength` squared each."""
    return (_turned(back) * strength * math.sqrt(math.sqrt(HEAD_DIM)) / CONSTANT_SIZE).unsqueeze(1)


def _layer(prefix: str, stream: int, context: float) -> dict[str, Tensor]:
    """One decoder layer that reads everything and writes `context` units (RMS) into the context part."""
    random = _Random(stream)
    readable = torch.ones(HIDDEN)
    readable[CONSTANT] = 0  # content only: a constant would favour one successor in every context
    content = 1.25 / math.sqrt(HIDDEN)
    spread = content * math.sqrt(_CONTENT_SCORE)
    query = random.normal(Q_HEADS * HEAD_DIM, HIDDEN, spread) * readable
    key = random.normal(KV_HEADS * HEAD_DIM, HIDDEN, spread) * readable
    for head in range(_LOOKING_BACK):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        query[rows, CONSTANT : CONSTANT + 1] = _constant_rows(back=head, strength=_LOOK_BACK)
    key[:HEAD_DIM, CONSTANT : CONSTANT + 1] = _constant_rows(back=0, strength=_LOOK_BACK)
    value = random.normal(KV_HEADS * HEAD_DIM, HIDDEN, content) * readable
    out = torch.zeros(HIDDEN, Q_HEADS * HEAD_DIM)
    width = CONTEXT.stop - CONTEXT.start
    out[CONTEXT] = random.normal(width, Q_HEADS * HEAD_DIM, context * 1.4 / math.sqrt(Q_HEADS * HEAD_DIM))
    gate = random.normal(MLP, HIDDEN, 1.5 * content) * readable
    up = random.normal(MLP, HIDDEN, 1.5 * content) * readable
    down = torch.zeros(HIDDEN, MLP)
    down[CONTEXT] = random.normal(width, MLP, context * 0.6 / math.sqrt(MLP))
    return {
        f"{prefix}.self_attn.q_proj.weight": query,
        f"{prefix}.self_attn.k_proj.weight": key,
        f"{prefix}.self_attn.v_proj.weight": value,
        f"{prefix}.self_attn.o_proj.weight": out,
        f"{prefix}.mlp.gate_proj.weight": gate,
        f"{prefix}.mlp.up_proj.weight": up,
        f"{prefix}.mlp.down_proj.weight": down,
        f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _causal_lm(readout: float) -> dict[str, Tensor]:
    weights = {
        "model.embed_tokens.weight": _embedding(),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _head(readout),
    }
    for layer in range(LAYERS):
        weights |= _layer(f"model.layers.{layer}", stream=10 + layer, context=0.8)
    return weights


def _eagle() -> tuple[dict[str, object], dict[str, Tensor]]:
    """An EAGLE head: one layer on the token's embedding and a little of the target's context; embedding and head are shared."""
    config = _config("LlamaForCausalLMEagle", 1)
    merge = torch.zeros(HIDDEN, 2 * HIDDEN)
    merge[:, :HIDDEN] = torch.eye(HIDDEN)
    context = torch.arange(CONTEXT.start, CONTEXT.stop)
    merge[context, HIDDEN + context] = DRAFT_SHARE
    weights = _layer("layers.0", stream=30, context=DRAFT_SHARE)
    del weights["layers.0.input_layernorm.weight"]  # the architecture has none in its first layer
    return config, weights | {"fc.weight": merge, "fc.bias": torch.zeros(HIDDEN)}


def _eagle3() -> tuple[dict[str, object], dict[str, Tensor]]:
    """An EAGLE3 head: the token enters through attention only, so five heads look at their own position and hand it on.

    In a draft step the residual is the head's previous output, whose token part must go: with `norm_output` that output has RMS
    1, the norm in front of the values leaves it as it is, and the same five heads subtract it. The head has its own output
    over live tokens only, which `d2t` maps to the target's vocabulary.
    """
    live = torch.tensor(tokenizer.printable_ids())
    config = _config("LlamaForCausalLMEagle3", 1) | {
        "num_key_value_heads": Q_HEADS,
        "draft_vocab_size": live.numel(),
        "norm_output": True,
        # The inputs of the target's layers 0 and 1.
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 0]},
        "num_aux_hidden_states": 2,
    }
    random = _Random(40)
    width = TOKEN.stop - TOKEN.start
    own = width // HEAD_DIM  # heads that hand the token on
    readable = torch.ones(2 * HIDDEN)
    readable[CONSTANT] = 0
    spread = 0.8 / math.sqrt(HIDDEN)
    query, key, value = (random.normal(Q_HEADS * HEAD_DIM, 2 * HIDDEN, spread) * readable for _ in range(3))
    rows, token = torch.arange(width), torch.arange(TOKEN.start, TOKEN.stop)
    for weight in (query, key):
        weight[:width] = 0
        for head in range(own):
            weight[head * HEAD_DIM : (head + 1) * HEAD_DIM, CONSTANT : CONSTANT + 1] = _constant_rows(back=0, strength=5.0)
    value[:width] = 0
    value[rows, token] = 1.0
    value[rows, HIDDEN + token] = -1.0
    out = torch.zeros(HIDDEN, Q_HEADS * HEAD_DIM)
    out[token, rows] = 1.0
    others = (Q_HEADS - own) * HEAD_DIM
    out[CONTEXT, width:] = random.normal(CONTEXT.stop - CONTEXT.start, others, 0.5 / math.sqrt(others))
    merge = torch.zeros(HIDDEN, 2 * HIDDEN)
    context = torch.arange(CONTEXT.start, CONTEXT.stop)
    merge[context, HIDDEN + context] = DRAFT_SHARE
    weights = {name: weight for name, weight in _layer("midlayer", stream=41, context=0.5).items() if ".mlp." in name}
    weights |= {
        "midlayer.self_attn.q_proj.weight": query,
        "midlayer.self_attn.k_proj.weight": key,
        "midlayer.self_attn.v_proj.weight": value,
        "midlayer.self_attn.o_proj.weight": out,
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "fc.weight": merge,
        "lm_head.weight": _head(DRAFT_SHARE * READOUT)[live],
        "d2t": live - torch.arange(live.numel()),
    }
    return config, weights
