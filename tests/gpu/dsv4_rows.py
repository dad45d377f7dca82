"""What is checked of the seam into SGLang's dsv4 backend on a GPU, row by row; `dsv4_seam.py` runs it.

Rows of the pool are written by SGLang's own quantisers, attention runs through SGLang's own forward pass, and each result must
lie within the bounds of the FP64 oracle on the values that SGLang's inverses say the bytes have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_specverify.backends.dsv4 import SpecverifyDeepseekV4Backend
from sglang_specverify.kernels.sparse_mla import SGLANG_MIN_AMAX, deepseek_v41_quantize_cache
from sglang_specverify.kernels.sparse_mla.bounds import RELATIVE_L2, rejections, relative_l2
from sglang_specverify.kernels.sparse_mla.formats import FORMATS
from tests.backends import dsv4
from tests.gpu.dsv4_steps import WRITTEN, Step, listed, lists_of
from tests.gpu.sparse_mla_calls import Checker

LAYOUTS = ("v41", "v41_new")
MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)


class NotHere(Exception):
    """A row that this machine cannot run, with the reason."""


def _each(c: Checker) -> list[tuple[int, str]]:
    """Layers of every ratio with both layouts; without a GPU two of them."""
    every = list(itertools.product(range(len(dsv4.RATIOS)), LAYOUTS))
    return every if c.device != "cpu" else [every[0], every[-1]]


def _small(c: Checker, tokens: int) -> int:
    return tokens if c.device != "cpu" else min(tokens, 3)


def _width(c: Checker) -> int:
    return 512 if c.device != "cpu" else 64


def eager(c: Checker, *, tokens: int, chain: bool, mode: ForwardMode) -> None:
    """Steps of one kind, eager."""
    for layer, layout in _each(c):
        step = Step(c.device, layer, layout, _small(c, tokens), _width(c), real=16 if layer == 1 else 64)
        for seed in range(c.many(3)):
            step.draw(seed, chain=chain, missing=0.0 if chain else 0.1)
            c.note(f"layer {layer}, {layout}, seed {seed}", step.wrong(step.run(mode)))


def captured(c: Checker) -> None:
    """A step captured in a graph, replayed with other lists and lengths, fewer rows, and eager steps of another size between."""
    for layer, layout in _each(c):
        step = Step(c.device, layer, layout, _small(c, 24), _width(c))
        other = Step(c.device, layer, layout, _small(c, 5), _width(c))
        held: list[tuple[torch.Tensor, torch.Tensor]] = []

        def run(step: Step = step, held: list[Any] = held) -> None:
            held[:] = [step.run(ForwardMode.TARGET_VERIFY)]

        replay = c.graph(run)
        # -1 and slots beyond the pool from none to all but each window's first.
        for seed, missing in enumerate((0.0, 0.1, 0.6, 1.0)):
            step.draw(seed, missing=missing)
            replay()
            c.note(f"layer {layer}, {layout}, {missing:.0%} missing", step.wrong(held[0]))
        step.draw(7, chain=True, missing=0.0)
        replay()
        c.note(f"layer {layer}, {layout}, chain", step.wrong(held[0]))
        for left in (1, 2, 17):
            if left < step.tokens:
                step.draw(10 + left, padded=step.tokens - left)
                replay()
                c.note(f"layer {layer}, {layout}, {left} rows left", step.wrong(held[0]))
        for turn in range(c.many(6)):
            step.draw(20 + turn)
            other.draw(30 + turn)
            replay()
            between = other.run()
            first = tuple(one.clone() for one in held[0])
            replay()
            found = step.wrong(held[0]) + other.wrong(between)
            same = all(map(torch.equal, first, held[0]))
            c.note(f"layer {layer}, {layout}, turn {turn}", found + ([] if same else ["a replay differs from the one before"]))


def far_pages(c: Checker) -> None:
    """Pages further apart than they are long."""
    for (layer, layout), gap in zip(_each(c), itertools.cycle((512, 16, 4096)), strict=False):
        step = Step(c.device, layer, layout, _small(c, 9), _width(c), gap=gap)
        c.note(f"layer {layer}, {layout}, {gap} bytes", step.wrong(step.run()))


def faults(c: Checker) -> None:
    """What must be seen: a wrong scale, a wrong length, another row, each after the right result was accepted."""
    for layer, layout in _each(c):
        step = Step(c.device, layer, layout, _small(c, 4), _width(c))
        step.draw(1, missing=0.0)
        expected = step.expected()
        c.note("without a fault", rejections(*step.run(), expected))
        for name, break_ in {"a scale": _break_scale, "a length": _break_length, "an entry": _break_entry}.items():
            mend = break_(step)
            seen = rejections(*step.run(), expected)
            mend()
            c.note(f"layer {layer}, {layout}: {name}", [] if seen else ["was not seen"])
        c.note("mended", rejections(*step.run(), expected))


def _break_scale(step: Step) -> Callable[[], None]:
    """One scale byte of the first row of the first window, twice what it was."""
    buffer = step.pool.get_swa_key_buffer_radix(step.layer).view(torch.uint8)
    slot = int(step.lists["swa"][0, 0])
    page, row = slot // dsv4.PAGE, slot % dsv4.PAGE
    at = row * 528 + 512 if step.layout == "v41_new" else dsv4.PAGE * 512 + row * 16
    old = buffer[page, at].clone()
    buffer[page, at] += 1
    return lambda: buffer[page, at].copy_(old)


def _break_length(step: Step) -> Callable[[], None]:
    old = step.lists["swa_lens"].clone()
    step.lists["swa_lens"][0] = int(old[0]) - 1 if int(old[0]) > 1 else int(old[0]) + 1
    return lambda: step.lists["swa_lens"].copy_(old)


def _break_entry(step: Step) -> Callable[[], None]:
    old = step.lists["swa"].clone()
    step.lists["swa"][0, 0] = (int(old[0, 0]) + 1) % WRITTEN
    return lambda: step.lists["swa"].copy_(old)


def store(c: Checker, *, layout: str, layer: int | None) -> None:
    """SGLang's store kernel, compiled here, against the plugin's quantiser: every byte of a cache. `layer` None: the window's."""
    if c.device == "cpu":
        raise NotHere("a CUDA kernel")
    pool = dsv4.make_pool(layout, device=c.device)
    place = 0 if layer is None else layer
    name = "swa_mxfp8" if layer is None else "main_kv_fp4"
    rows = dsv4.PAGE if layer is None else dsv4.PAGE // dsv4.RATIOS[place]
    buffer = (pool.get_swa_key_buffer_radix(place) if layer is None else pool.get_extra_key_buffer(place)).view(torch.uint8)
    write = pool.set_swa_key_buffer_radix_fused if layer is None else pool.set_extra_key_buffer_fused
    g = torch.Generator().manual_seed(5)
    slots = torch.randperm(dsv4.SLOTS // (1 if layer is None else dsv4.RATIOS[place]), generator=g)[:200]
    for dtype in (torch.int32, torch.int64):
        for kind, x in _latents(len(slots), g).items():
            x = x.to(c.device)
            buffer.fill_(0xFF)
            want = buffer.clone()
            write(place, slots.to(c.device, dtype), x)
            pages = want[:, : rows * FORMATS[name].row_bytes]
            options = {"min_amax": SGLANG_MIN_AMAX} if layer is None else {}
            arrangement = "interleaved" if layout == "v41_new" else "block_split"
            deepseek_v41_quantize_cache(x, name, rows, pages, slots.to(c.device), layout=arrangement, **options)
            differ = int((buffer != want).sum())
            c.note(f"{kind}, {dtype}", [f"{differ} of {len(slots) * FORMATS[name].row_bytes} bytes differ"] if differ else [])


def compile_store_kernels() -> list[str]:
    """Compile what the rows about the store kernel call, at once, before anything is captured; why it failed, where it did."""
    from sglang.kernels.ops.attention.dsv4 import attn
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    kinds = [("v4", dsv4.PAGE), *((layout, dsv4.PAGE) for layout in LAYOUTS)]
    kinds += [(f"v41_fp4{layout.removeprefix('v41')}", dsv4.PAGE // ratio) for layout in LAYOUTS for ratio in (1, 2)]
    options = [
        {
            "name": "flashmla",
            "input_dtype": torch.bfloat16,
            "index_dtype": dtype,
            "page_size": rows,
            "layout": KVLayout.parse(kind),
        }
        for kind, rows in kinds
        for dtype in (torch.int32, torch.int64)
    ]
    with ThreadPoolExecutor(len(options)) as pool:
        jobs = [pool.submit(attn._jit_fused_store_module, **one) for one in options]
        return [
            f"{one['layout']}: {str(error)[-500:]}" for one, job in zip(options, jobs, strict=True) if (error := job.exception())
        ]


def _latents(count: int, g: torch.Generator) -> dict[str, torch.Tensor]:
    """bf16 [n, 512]: ordinary ones, of every size, and on the midpoints between codes."""
    x = torch.randn(count, 512, generator=g)
    sizes = 2.0 ** torch.randint(-30, 12, (count, 16), generator=g).repeat_interleave(32, dim=1)
    halves = torch.randint(-24, 25, (count, 512), generator=g) / 4.0
    halves[:, ::16] = 6.0
    found = {"ordinary": x, "of every size": x * sizes, "midpoints": halves, "zeros": torch.zeros(count, 512)}
    return {name: value.to(torch.bfloat16) for name, value in found.items()}


def dequantiser(c: Checker) -> None:
    """SGLang's conversion in front of sparse prefill, plain Triton behind a check of the architecture that the plugin answers."""
    from sglang.kernels.ops.attention.dsv4 import dequant_k_cache

    if c.device == "cpu":
        raise NotHere("it asks for the device's architecture")
    for layer, layout in _each(c):
        pool = dsv4.make_pool(layout, device=c.device)
        caches = dsv4.fill(pool, layer, WRITTEN, torch.Generator().manual_seed(layer))
        slots = torch.randint(0, WRITTEN, (100,), generator=torch.Generator().manual_seed(9)).to(c.device)
        buffers = [(pool.get_swa_key_buffer_radix(layer), dsv4.PAGE, pool.get_swa_key_layout())]
        if caches[1] is not None:
            buffers.append((pool.get_extra_key_buffer(layer), dsv4.PAGE // dsv4.RATIOS[layer], pool.get_extra_key_layout(layer)))
        for cache, (buffer, rows, kind) in zip(caches, buffers, strict=False):
            assert cache is not None
            for dtype in (torch.int32, torch.int64):
                got = dequant_k_cache.dequantize_k_cache_paged_dsv4(buffer, slots.to(dtype), rows, layout=kind)
                differ = int((got[:, 0].double() != cache[slots]).sum())
                c.note(f"{kind}, {dtype}", [f"{differ} of {got.numel()} values differ"] if differ else [])


def flash_mla(c: Checker) -> None:
    """Rows of 584 bytes, SGLang's default on Hopper: written by its store kernel, read by FlashMLA through the seam."""
    if c.device == "cpu":
        raise NotHere("FlashMLA is for CUDA")
    from sglang.kernels.ops.attention.flash_mla_interface import get_mla_metadata

    pool, g = dsv4.make_pool("v4", None, device=c.device), torch.Generator().manual_seed(4)
    x = torch.randn(WRITTEN, 512, generator=g).to(c.device, torch.bfloat16)
    pool.set_swa_key_buffer_radix_fused(0, torch.arange(WRITTEN, dtype=torch.int32, device=c.device), x)
    backend = SpecverifyDeepseekV4Backend(dsv4.make_runner(pool, device=c.device))
    lists = {name: value.to(c.device) for name, value in lists_of(8, 512, 3, 0.0).items()}
    backend.forward_metadata = dsv4.metadata(0, lists)
    backend.forward_metadata.core_attn_metadata.c0_flashmla_metadata = get_mla_metadata()[0]
    q = torch.randn(8, dsv4.HEADS, 512, generator=g).to(c.device, torch.bfloat16)
    sink = torch.randn(dsv4.HEADS, generator=g).to(c.device)
    out = dsv4.attend(backend, 0, q, sink, ForwardMode.DECODE)[:, None]
    keys = [listed(x.double(), *row) for row in zip(lists["swa"], lists["swa_lens"], strict=True)]
    # The oracle's rows are those before they were rounded to E4M3, as P is in that contract.
    error = relative_l2(out, dsv4.expected(q, sink, keys))
    c.note("output", [] if error <= RELATIVE_L2["e4m3"] else [f"relative L2 error {error:.3g}"])
    calls = {row["kernel"]: row["calls"] for row in backend.specverify_sparse_mla.report() if row["calls"]}
    c.note("route", [] if calls == {"stock": 1} else [f"{calls}"])


def pool_choice(c: Checker) -> None:
    """With both flags SGLang makes the rows of V4.1 on Hopper, for all ratios of such a model."""
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.srt.mem_cache import deepseek_v4_memory_pool, kv_cache_configurator

    if c.device == "cpu":
        raise NotHere("it is for Hopper")
    for module in (deepseek_v4_memory_pool, kv_cache_configurator):
        layout, option = module.select_dsv4_kv_layout()
        pool = dsv4.make_pool(layout, option, device=c.device)
        found = [pool.compressed_kv_layout(ratio) for ratio in (1, 2)]
        right = layout is KVLayout.V41 and found == [KVLayout.V41_FP4] * 2
        c.note(module.__name__, [] if right else [f"{layout}, {found}"])


def _stores() -> dict[str, Callable[[Checker], None]]:
    def row(layout: str, layer: int | None) -> Callable[[Checker], None]:
        return lambda c: store(c, layout=layout, layer=layer)

    names = {None: "528 bytes", 1: "288 bytes, ratio 2", 2: "288 bytes, ratio 1"}
    return {f"store kernel, {name}, {layout}": row(layout, layer) for layout in LAYOUTS for layer, name in names.items()}


#: Rows by name. A row that attends must have come to the plugin's kernel.
WRITERS: dict[str, Callable[[Checker], None]] = {
    "pool choice": pool_choice, **_stores(), "dequantiser for sparse prefill": dequantiser,
    "rows of 584 bytes, left to FlashMLA": flash_mla,
}  # fmt: skip
READERS: dict[str, Callable[[Checker], None]] = {
    "decode, 1 row": lambda c: eager(c, tokens=1, chain=False, mode=MODES[0]),
    "decode, 64 rows": lambda c: eager(c, tokens=64, chain=False, mode=MODES[0]),
    "verify, 4 requests of 6 rows": lambda c: eager(c, tokens=24, chain=True, mode=MODES[1]),
    "draft extend, 12 rows": lambda c: eager(c, tokens=12, chain=True, mode=MODES[2]),
    "graph, other lists, lengths and rows, eager between": captured,
    "page strides": far_pages,
    "faults": faults,
}
ROWS = {**WRITERS, **READERS}
