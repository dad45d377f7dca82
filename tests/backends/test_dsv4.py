"""The seam into SGLang's dsv4 backend: its real forward pass against FP64, what is left to FlashMLA and why, what is hooked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_specverify.backends.dsv4 import SparseMlaCalls, SpecverifyDeepseekV4Backend, SpecverifyDeepseekV4MultiStepBackend
from sglang_specverify.backends.dsv4_calls import kernel_arguments, read_call
from sglang_specverify.door import sparse_mla as door
from sglang_specverify.errors import SpecverifyError
from sglang_specverify.hardware import Hardware
from sglang_specverify.kernels.sparse_mla.bounds import rejections
from sglang_specverify.routing.sparse_mla import SparseCall
from sglang_specverify.upstream import has_dsv4_seam, installed_version
from tests.backends import dsv4
from tests.door.machines import machine
from tests.interpreter import repair

H200 = Hardware("nvidia", "sm_90", "H200", 1)
B200 = Hardware("nvidia", "sm_100", "B200", 1)
#: More than a page of any cache has.
WRITTEN = 300


@pytest.fixture(autouse=True)
def configured(no_flags: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(door, "_built", [])
    monkeypatch.setattr(door, "_said", set())
    for name in ("LAYOUT", "COMPRESSED_KV_LAYOUT"):
        monkeypatch.delenv(f"SGLANG_DSV4_{name}", raising=False)
    with dsv4.published():
        yield


@pytest.fixture
def seam() -> None:
    if not has_dsv4_seam(installed_version()):
        pytest.skip("this SGLang's dsv4 backend imports FlashMLA's function at each call")


@pytest.fixture
def kernels(seam: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The plugin's kernels asked for, in the interpreter; the calls that FlashMLA got."""
    got: list[dict[str, Any]] = []

    def flash(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        got.append(arguments)
        return torch.full_like(arguments["q"], 7.0), torch.zeros(1)

    dsv4.stand_in(monkeypatch, flash)
    monkeypatch.setenv("SGLANG_SPECVERIFY_SPARSE_MLA", "1")
    monkeypatch.setenv("SGLANG_SPECVERIFY_KERNELS", "triton")
    # The interpreter that computes 16-bit types as a GPU does.
    repair.apply()
    yield got
    repair.remove()


def lists_of(seed: int) -> dict[str, torch.Tensor]:
    """Of two rows: some entries -1, lengths short of the width, one row of which nothing is selected."""
    g = torch.Generator().manual_seed(seed)
    swa = torch.randint(0, WRITTEN, (2, 128), generator=g, dtype=torch.int32)
    extra = torch.randint(0, WRITTEN, (2, 64), generator=g, dtype=torch.int32)
    swa[0, 5], extra[0, ::7], extra[1] = -1, -1, -1
    return {
        "swa": swa,
        "swa_lens": torch.tensor([128, 37], dtype=torch.int32),
        "extra": extra,
        "extra_lens": torch.tensor([50, 1], dtype=torch.int32),
    }


def keys_of(lists: dict[str, torch.Tensor], window: torch.Tensor, extra: torch.Tensor | None) -> list[torch.Tensor]:
    """The rows that each query row reads; the third is SGLang's padding: slot 0 of the window and nothing selected."""
    found = []
    for row in range(2):
        slots = lists["swa"][row, : lists["swa_lens"][row]].long()
        parts = [window[slots[slots >= 0]]]
        if extra is not None:
            slots = lists["extra"][row, : lists["extra_lens"][row]].long()
            parts.append(extra[slots[slots >= 0]])
        found.append(torch.cat(parts))
    return [*found, window[:1]]


@pytest.mark.parametrize(
    ("layer", "layout", "mode"),
    [
        (0, "v41", ForwardMode.DECODE),
        (1, "v41", ForwardMode.TARGET_VERIFY),
        (2, "v41_new", ForwardMode.DRAFT_EXTEND_V2),
    ],
)
def test_the_forward_pass(layer: int, layout: str, mode: ForwardMode, kernels: list[dict[str, Any]]) -> None:
    g = torch.Generator().manual_seed(layer)
    pool = dsv4.make_pool(layout)
    backend = SpecverifyDeepseekV4Backend(dsv4.make_runner(pool))
    window, extra = dsv4.fill(pool, layer, WRITTEN, g)
    lists = lists_of(layer)
    backend.forward_metadata = dsv4.metadata(dsv4.RATIOS[layer], lists)
    seam, seen = backend._flash_mla_with_kvcache, []
    backend._flash_mla_with_kvcache = lambda **arguments: seen.append(seam(**arguments)) or seen[-1]
    # Of one tensor-parallel rank of four: heads 16 to 63 are padding, and so is the third row.
    q = torch.zeros(3, dsv4.HEADS, 512, dtype=torch.bfloat16)
    q[:, :16] = torch.randn(3, 16, 512, generator=g) * 2
    sink = torch.randn(dsv4.HEADS, generator=g)
    out = dsv4.attend(backend, layer, q, sink, mode)
    assert kernels == [] and len(seen) == 1
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    lse = seen[0][1]
    assert lse.shape == (3, dsv4.HEADS, 1)
    keys = keys_of(lists, window, extra)
    assert rejections(out[:, None], lse.transpose(1, 2), dsv4.expected(q, sink, keys)) == []
    # What the translation could get wrong shows: a list without its length, a sink left out, the other cache's rows.
    wrong = [torch.cat([keys[0], window[:1]]), *keys[1:]]
    assert rejections(out[:, None], lse.transpose(1, 2), dsv4.expected(q, sink, wrong))
    assert rejections(out[:, None], lse.transpose(1, 2), dsv4.expected(q, torch.full_like(sink, -torch.inf), keys))
    assert backend.specverify_sparse_mla.report()[0 if extra is None else 1]["calls"] == 1
    if layout == "v41_new":
        # The other arrangement of the same bytes, which nothing but the pool can tell.
        backend.specverify_sparse_mla.interleaved = False
        out = dsv4.attend(backend, layer, q, sink, mode)
        assert rejections(out[:, None], seen[-1][1].transpose(1, 2), dsv4.expected(q, sink, keys))


def test_an_idle_batch_is_sglangs(kernels: list[dict[str, Any]]) -> None:
    backend = SpecverifyDeepseekV4Backend(dsv4.make_runner(dsv4.make_pool()))
    q = torch.zeros(0, dsv4.HEADS, 512, dtype=torch.bfloat16)
    assert dsv4.attend(backend, 0, q, torch.zeros(dsv4.HEADS), ForwardMode.IDLE).shape == (0, dsv4.HEADS, 512)
    assert kernels == []


def test_rows_of_584_bytes_go_to_flashmla(kernels: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool = dsv4.make_pool("v4", None)
    backend = SpecverifyDeepseekV4Backend(dsv4.make_runner(pool))
    backend.forward_metadata = dsv4.metadata(0, lists_of(0))
    q = torch.zeros(2, dsv4.HEADS, 512, dtype=torch.bfloat16)
    for _ in range(2):
        out = dsv4.attend(backend, 0, q, torch.zeros(dsv4.HEADS), ForwardMode.DECODE)
        assert bool((out == 7.0).all())
    assert len(kernels) == 2 and kernels[0]["k_cache"].shape[-1] == 584
    # FlashMLA gets what SGLang passes and no more.
    assert kernels[0]["use_legacy"] is True and kernels[0]["block_table"] is None
    said = [line for line in caplog.messages if "layers with a window alone" in line]
    assert len(said) == 1 and "rows of 584 bytes (v4)" in said[0] and "stock" in said[0]


def test_strict_mode_refuses_at_start(kernels: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    with pytest.raises(SpecverifyError, match=r"STRICT=1 and not served by the plugin: rows of 584 bytes"):
        SpecverifyDeepseekV4Backend(dsv4.make_runner(dsv4.make_pool("v4", None)))
    SpecverifyDeepseekV4Backend(dsv4.make_runner(dsv4.make_pool()))


def test_a_pool_that_nothing_else_reads_is_never_left(kernels: list[dict[str, Any]]) -> None:
    """On Hopper the rows of V4.1 have no reader but this one, so that what it refuses is an error without strict mode too."""
    with pytest.raises(SpecverifyError, match=r"no other kernel reads .* rows of 528 bytes \(v41\) among the selected"):
        SpecverifyDeepseekV4Backend(dsv4.make_runner(dsv4.make_pool("v41", "fp8")))
    calls = SparseMlaCalls(lambda **_: (torch.ones(1), torch.ones(1)), H200, interleaved=False, part="target")
    with pytest.raises(SpecverifyError, match="no other kernel reads on SM90: 24 heads"):
        calls.decide(SparseCall("v41", "v41_fp4", heads=24))
    assert not SparseMlaCalls(None, B200, interleaved=False, part="target").decide(SparseCall("v41", heads=24)).served


def test_a_sglang_without_the_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as 0.5.22: what there is serves as it did, and the reason is said."""
    for name, value in (("SPARSE_MLA", "1"), ("KERNELS", "triton")):
        monkeypatch.setenv(f"SGLANG_SPECVERIFY_{name}", value)
    monkeypatch.setattr("sglang.srt.layers.attention.deepseek_v4_backend.is_cuda", lambda: False)
    backend = SpecverifyDeepseekV4Backend(dsv4.make_runner(dsv4.make_pool("v4", None)))
    assert "no seam" in backend.specverify_sparse_mla.report()[0]["reason"]
    assert not hasattr(backend, "_flash_mla_with_kvcache")


def test_all_steps_of_a_draft(kernels: list[dict[str, Any]]) -> None:
    container = SpecverifyDeepseekV4MultiStepBackend(dsv4.make_runner(dsv4.make_pool(), draft=True), 1, 2)
    assert [type(step) for step in container.attn_backends] == [SpecverifyDeepseekV4Backend] * 2
    assert [step.speculative_step_id for step in container.attn_backends] == [0, 1]
    assert {row["part"] for step in container.attn_backends for row in step.specverify_sparse_mla.report()} == {"draft"}


def call_of(**changes: Any) -> dict[str, Any]:
    """A call as SGLang makes it, on no device."""
    found: dict[str, Any] = {
        "q": torch.empty(2, 1, 64, 512, dtype=torch.bfloat16, device="meta"),
        "k_cache": torch.empty(3, 256 * 528 + 512, dtype=torch.uint8, device="meta")[:, : 256 * 528].view(3, 256, 1, 528),
        "head_dim_v": 512,
        "block_table": None,
        "cache_seqlens": None,
        "tile_scheduler_metadata": SimpleNamespace(),
        "softmax_scale": 512**-0.5,
        "is_fp8_kvcache": True,
        "indices": torch.empty(2, 1, 192, dtype=torch.int32, device="meta"),
        "topk_length": torch.empty(2, dtype=torch.int32, device="meta"),
        "attn_sink": torch.empty(64, device="meta"),
        "extra_k_cache": torch.empty(3, 128 * 288, dtype=torch.uint8, device="meta").view(3, 128, 1, 288),
        "extra_indices_in_kvcache": torch.empty(2, 1, 512, dtype=torch.int32, device="meta"),
        "extra_topk_length": torch.empty(2, dtype=torch.int32, device="meta"),
    }
    return found | changes


def test_a_call_is_read_and_translated_without_a_copy() -> None:
    call = call_of()
    assert read_call(call) == SparseCall("v41", "v41_fp4")
    assert read_call(call_of(extra_k_cache=None, extra_indices_in_kvcache=None, extra_topk_length=None)) == SparseCall("v41")
    assert read_call(call_of(k_cache=call["k_cache"].view(torch.float8_e4m3fn))) == SparseCall("v41", "v41_fp4")
    found = kernel_arguments(call, interleaved=True)
    assert found["swa_cache"].shape == (3, 256 * 528) and found["swa_cache"].stride() == (256 * 528 + 512, 1)
    assert (found["swa_page_rows"], found["main_page_rows"]) == (256, 128)
    assert found["swa_layout"] == found["main_layout"] == "interleaved"
    assert found["swa_lens"] is call["topk_length"] and found["main_lens"] is call["extra_topk_length"]
    assert kernel_arguments(call, interleaved=False)["main_layout"] == "block_split"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"k_cache": torch.empty(3, 256, 1, 584, dtype=torch.uint8, device="meta")}, "rows of 584 bytes (v4) in the window's"),
        ({"k_cache": torch.empty(3, 256, 1, 600, dtype=torch.uint8, device="meta")}, "a kind that nobody here knows (600 bytes)"),
        ({"k_cache": torch.empty(3, 256, 1, 264, dtype=torch.bfloat16, device="meta")}, "k_cache that is no view"),
        ({"k_cache": torch.empty(3, 2, 256, 528, dtype=torch.uint8, device="meta")}, "k_cache that is no view"),
        ({"extra_k_cache": torch.empty(3, 128, 1, 528, dtype=torch.uint8, device="meta")}, "(v41) among the selected"),
        ({"extra_k_cache": None}, "one of extra_k_cache and extra_indices_in_kvcache alone"),
        ({"q": torch.empty(2, 1, 64, 512, dtype=torch.float16, device="meta"), }, "Q in float16"),
        ({"q": torch.empty(2, 1, 64, 576, dtype=torch.bfloat16, device="meta")}, "head dim 576"),
        ({"q": torch.empty(2, 2, 64, 512, dtype=torch.bfloat16, device="meta")}, "2 rows a request"),
        ({"q": torch.empty(2, 64, 512, dtype=torch.bfloat16, device="meta")}, "q of other than four dimensions"),
        ({"q": torch.empty(2, 1, 64, 513, dtype=torch.bfloat16, device="meta")[..., :512]}, "16 bytes do not divide"),
        ({"q": torch.empty(2, 1, 24, 512, dtype=torch.bfloat16, device="meta"),
          "attn_sink": torch.empty(24, device="meta")}, "24 heads"),
        ({"indices": torch.empty(2, 1, 128, dtype=torch.int64, device="meta")}, "indices that is no int32"),
        ({"topk_length": torch.empty(3, dtype=torch.int32, device="meta")}, "topk_length that is no int32 [T]"),
        ({"attn_sink": torch.empty(32, device="meta")}, "attn_sink that is no FP32 [H]"),
        ({"block_table": torch.empty(2, device="meta")}, "block_table"),
        ({"causal": True}, "causal"),
        ({"is_fp8_kvcache": False}, "a cache that is not quantised"),
        ({"head_dim_v": 448}, "head_dim_v 448"),
        ({"softmax_scale": None}, "no softmax_scale"),
        ({"descale_q": torch.empty(1, device="meta")}, "descale_q"),
    ],
)  # fmt: skip
def test_what_is_left_to_flashmla(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, where FlashMLA reads the pool too; the call reaches it as it came."""
    monkeypatch.setenv("SGLANG_SPECVERIFY_SPARSE_MLA", "1")
    got: list[dict[str, Any]] = []
    result = (torch.ones(1), torch.ones(1))
    calls = SparseMlaCalls(lambda **a: got.append(a) or result, B200, interleaved=False, part="target")
    call = call_of(**changes)
    assert calls(**call) is result
    assert got == [call] or all(got[0][name] is value for name, value in call.items())
    assert reason in calls.report()[0]["reason"]


def test_more_rows_than_a_grid_has() -> None:
    many = {"q": torch.empty(65536, 1, 64, 512, dtype=torch.bfloat16, device="meta")}
    many |= {
        name: torch.empty(65536, 1, 64, dtype=torch.int32, device="meta") for name in ("indices", "extra_indices_in_kvcache")
    }
    many |= {name: torch.empty(65536, dtype=torch.int32, device="meta") for name in ("topk_length", "extra_topk_length")}
    assert read_call(call_of(**many)).unknown == {"more than 65535 rows"}
    fewer = {name: value[:65535] for name, value in many.items()}
    assert read_call(call_of(**fewer)) == SparseCall("v41", "v41_fp4")


Patched = Callable[[], list[str]]


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Patched:
    """Install, and say which of SGLang's names are then the plugin's."""
    from sglang.kernels.ops.attention.dsv4 import dequant_k_cache
    from sglang.srt.layers.attention import deepseek_v4_trtllm_backend
    from sglang.srt.mem_cache import deepseek_v4_memory_pool, kv_cache_configurator

    from sglang_specverify.door.scheduler import _patch

    places = [
        (deepseek_v4_trtllm_backend, "create_deepseek_v4_attn_backend"),
        (deepseek_v4_trtllm_backend, "create_deepseek_v4_multistep_backend"),
        (deepseek_v4_memory_pool, "select_dsv4_kv_layout"),
        (kv_cache_configurator, "select_dsv4_kv_layout"),
        (dequant_k_cache, "get_jit_cuda_arch"),
    ]
    for owner, name in places:
        monkeypatch.setattr(owner, name, getattr(owner, name))

    def install() -> list[str]:
        door.install(_patch)
        door.install(_patch)
        marked = [(owner, name) for owner, name in places if getattr(getattr(owner, name), "_specverify", False)]
        return [f"{owner.__name__.rpartition('.')[2]}.{name}" for owner, name in marked]

    return install


FACTORIES = [f"deepseek_v4_trtllm_backend.create_deepseek_v4_{kind}_backend" for kind in ("attn", "multistep")]
POOL = [f"{module}.select_dsv4_kv_layout" for module in ("deepseek_v4_memory_pool", "kv_cache_configurator")]
POOL.append("dequant_k_cache.get_jit_cuda_arch")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, []),
        ({"SPARSE_MLA": "0", "FP4_POOL": "off"}, []),
        ({"SPARSE_MLA": "1"}, FACTORIES),
        ({"SPARSE_MLA": "1", "FP4_POOL": "1"}, FACTORIES + POOL),
        ({"SPARSE_MLA": "1", "FP4_POOL": "1", "DISABLE": "1"}, []),
        # Said at start-up, not here, where SGLang swallows what a plugin raises.
        ({"SPARSE_MLA": "ja"}, FACTORIES),
        ({"SPARSE_MLA": "1", "DISABLE": "ja"}, FACTORIES),
    ],
)
def test_hooked_only_where_asked(
    flags: dict[str, str], found: list[str], hooked: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in flags.items():
        monkeypatch.setenv(f"SGLANG_SPECVERIFY_{name}", value)
    assert hooked() == found


def test_the_factories_build_it(kernels: list[dict[str, Any]], hooked: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the target through SGLang's registry, and for drafts, whose factory imports the same names by itself."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    hooked()
    pool = dsv4.make_pool()
    draft = DraftBackendFactory(dsv4.make_runner(pool, draft=True), 1, 1)
    target = ATTENTION_BACKENDS["dsv4"](dsv4.make_runner(pool))
    assert type(target) is SpecverifyDeepseekV4Backend
    name, steps = draft._create_dsv4_decode_backend()
    assert name == "dsv4" and type(steps) is SpecverifyDeepseekV4MultiStepBackend
    name, extend = draft._create_dsv4_prefill_backend()
    assert name == "dsv4" and type(extend) is SpecverifyDeepseekV4Backend
    assert {(row["part"], row["kernel"]) for row in door.report()} == {("target", "sparse_mla"), ("draft", "sparse_mla")}
    # A flag that is wrong is an error where the backend would be built.
    monkeypatch.setenv("SGLANG_SPECVERIFY_SPARSE_MLA", "ja")
    with pytest.raises(SpecverifyError, match="SPARSE_MLA='ja' is not a boolean"):
        ATTENTION_BACKENDS["dsv4"](dsv4.make_runner(pool))
    monkeypatch.setenv("SGLANG_SPECVERIFY_SPARSE_MLA", "0")
    assert type(ATTENTION_BACKENDS["dsv4"](dsv4.make_runner(pool))).__name__ == "DeepseekV4AttnBackend"


def test_another_attention_kernel_keeps_its_backend(kernels: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_attention_kind", lambda: "flashmla_mega")
    built: list[Any] = []
    create = door._target_factory(lambda runner, **kwargs: built.append(runner) or "stock")
    runner = dsv4.make_runner(dsv4.make_pool())
    assert create(runner) == "stock" and built == [runner] and door._built == []
    monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
    with pytest.raises(SpecverifyError, match="--dsv4-attn-backend flashmla_mega has a path of its own"):
        create(runner)


def test_the_pool_on_hopper(seam: None, hooked: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.kernels.ops.attention.dsv4 import dequant_k_cache
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.srt.mem_cache import deepseek_v4_memory_pool, kv_cache_configurator

    for name in ("SPARSE_MLA", "FP4_POOL"):
        monkeypatch.setenv(f"SGLANG_SPECVERIFY_{name}", "1")
    hooked()
    both = (deepseek_v4_memory_pool.select_dsv4_kv_layout, kv_cache_configurator.select_dsv4_kv_layout)
    with machine("SM90"):
        assert [select() for select in both] == [(KVLayout.V41, "auto")] * 2
        assert dequant_k_cache.get_jit_cuda_arch().major >= 10
        # What comes of it: the rows that the kernel reads, for the ratios of V4.1.
        pool = dsv4.make_pool(*both[0]())
        assert [pool.compressed_kv_layout(ratio) for ratio in (1, 2)] == [KVLayout.V41_FP4] * 2
        monkeypatch.setenv("SGLANG_DSV4_KV_LAYOUT", "v41_new")
        assert both[0]() == (KVLayout.V41_NEW, "auto")
        monkeypatch.setenv("SGLANG_DSV4_KV_LAYOUT", "v4")
        assert [select()[0] for select in both] == [KVLayout.V4] * 2
        monkeypatch.delenv("SGLANG_DSV4_KV_LAYOUT")
        monkeypatch.setenv("SGLANG_DSV4_Q8KV8_PREFILL", "1")
        assert both[0]()[0] is KVLayout.V4
        monkeypatch.setenv("SGLANG_SPECVERIFY_STRICT", "1")
        with pytest.raises(SpecverifyError, match="FP8 sparse prefill"):
            both[0]()
        monkeypatch.delenv("SGLANG_SPECVERIFY_STRICT")
        monkeypatch.setenv("SGLANG_SPECVERIFY_SPARSE_MLA", "0")
        with pytest.raises(SpecverifyError, match="nothing would read the pool"):
            both[1]()


def test_elsewhere_the_pool_is_sglangs(hooked: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARSE_MLA", "FP4_POOL"):
        monkeypatch.setenv(f"SGLANG_SPECVERIFY_{name}", "1")
    with machine("SM100"):
        decision = door.decide_pool()
    assert not decision.served and "SGLang makes these rows itself on SM100" in decision.reason


def test_server_info_says_what_ran(kernels: list[dict[str, Any]]) -> None:
    from sglang_specverify.door import scheduler

    output = SimpleNamespace(internal_state={})
    get = scheduler._with_routes(lambda scheduler, request: output)
    assert "specverify" not in get(None, None).internal_state
    door._note(SpecverifyDeepseekV4Backend(dsv4.make_runner(dsv4.make_pool())))
    with dsv4.get_parallel().override(dp_rank=0, pp_rank=0, tp_rank=0):
        said = get(None, None).internal_state["specverify"]
    assert said["parts"] == {} and {row["kernel"] for row in said["sparse_mla"]} == {"sparse_mla"}
