"""Names of the plugin's classes: SGLang looks into the names of its backends, so a subclass keeps the word of its parent."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang_specverify import backends


def _subclasses() -> Iterator[tuple[type, type]]:
    """Each class of `backends` with SGLang's nearest one above it, but for mixins, whose parent is the base of all."""
    for module in pkgutil.iter_modules(backends.__path__):
        found = importlib.import_module(f"{backends.__name__}.{module.name}")
        for _, cls in inspect.getmembers(found, inspect.isclass):
            if cls.__module__ == found.__name__:
                above = [parent for parent in cls.__mro__ if re.search(r"sglang\.srt\..*_backend$", parent.__module__)]
                if above and above[0].__name__ != "AttentionBackend":
                    yield cls, above[0]


SUBCLASSES = {cls.__name__: (cls, parent) for cls, parent in _subclasses()}


def test_every_backend_is_here() -> None:
    parents = {parent.__name__ for _, parent in SUBCLASSES.values()}
    assert parents >= {"FlashAttentionBackend", "TritonAttnBackend", "AiterAttnBackend", "DeepseekV4AttnBackend"}
    assert parents >= {"FlashAttentionMultiStepBackend", "TritonMultiStepDraftBackend", "AiterMultiStepDraftBackend"}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_name_keeps_the_word_of_its_parent(name: str) -> None:
    word = re.sub(r"(MultiStep)?(Draft)?(Attn)?Backend$", "", SUBCLASSES[name][1].__name__)
    assert word in name
    others = {"FlashAttention", "FlashInfer", "FlashMLA", "Triton", "Aiter", "DeepseekV4", "Sparse"} - {word}
    assert not [other for other in others if other.lower() in name.lower()]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "name",
    [name for name, (_, parent) in SUBCLASSES.items() if parent.__name__ in ("FlashAttentionBackend", "TritonAttnBackend")],
)
def test_dots3_serves_both_alike(name: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's Dots3 chooses its forward method by the class's name, in decode and in prompts."""
    from sglang.srt.layers.attention.dots_hybrid_backend import DotsSWAMLAAttnBackend
    from sglang.srt.models.dots3_common import modeling

    def method(cls: type, decodes: bool) -> object:
        backend = cls.__new__(cls)
        if wrapped:
            outer = DotsSWAMLAAttnBackend.__new__(DotsSWAMLAAttnBackend)
            outer.backend = backend
            backend = outer
        monkeypatch.setattr(modeling, "get_attn_backend", lambda: backend)
        asked = ("is_context_parallel_extend", "is_target_verify", "is_draft_extend_v2", "is_extend")
        mode = SimpleNamespace(**{name: lambda *_: False for name in asked}, is_decode_or_idle=lambda: decodes)
        mode.is_extend_without_speculative = lambda: not decodes
        layer = SimpleNamespace(use_swa=True, use_nsa=False)
        batch = SimpleNamespace(forward_mode=mode, attn_cp_metadata=None)
        return modeling.Dots3AttentionMLA.dispatch_attn_forward_method(layer, batch)

    cls, parent = SUBCLASSES[name]
    for decodes in (False, True):
        assert method(cls, decodes) == method(parent, decodes)
