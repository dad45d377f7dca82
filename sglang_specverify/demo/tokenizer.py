"""A byte-level BPE tokenizer, trained on one sentence when a model is written."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

VOCABULARY = 320
UNKNOWN, BOS, EOS = 0, 1, 2
_SPECIAL = ("<unk>", "<s>", "</s>")
_SENTENCE = "the quick brown fox jumps over the lazy dog"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@functools.cache
def _trained() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token=_SPECIAL[UNKNOWN]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([_SENTENCE] * 100, trainer)
    return made


@functools.cache
def printable_ids() -> list[int]:
    """Ids of the tokens that decode to printable ASCII: the only ones that the models produce. Ascending."""
    made = _trained()
    texts = {i: made.decode([i], skip_special_tokens=False) for i in range(len(_SPECIAL), made.get_vocab_size())}
    return [i for i, text in texts.items() if text.isascii() and text.isprintable()]


def save(directory: Path, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, with a chat template."""
    _trained().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _SPECIAL[UNKNOWN],
        "bos_token": _SPECIAL[BOS],
        "eos_token": _SPECIAL[EOS],
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
