"""SGLang's own attention test kit, driven through the plugin's backends with the draft's real topk.

    python -m tests.gpu.sglang_kit            on a machine with a CUDA device and SGLang's own packages: about a minute

The kit (`sglang.test.kits.attention_unittest`) projects hidden states, fills a pool, runs a layer of SGLang's over a backend, and
compares with its own reference under a mask; eager, then with the metadata of a capture and a replay (it captures no graph). It
leaves topk at 0, the algorithm at none and the model empty, and hands every backend a mask over the whole context: the first
three are set here before the backend is built, and the mask goes where and in the layout in which the backend publishes it, as
SGLang's draft stage does. A case counts only if the plugin's kernel ran it. Without a GPU everything runs in Triton's
interpreter, with a stand-in for FlashAttention. Exits with 1 if a case fails.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from tests.gpu.environment import prepare

#: The kit's one tree is a root with two children.
DRAFTS, HEAD_DIM = 3, 128
KERNELS = "SGLANG_SPECVERIFY_TREE_KERNEL"


@dataclass(frozen=True)
class KitCase:
    """One call of the kit.

    It gives its first request the row 0 of `req_to_token`, which SGLang keeps for padded ones; these have length 1, so that
    one has more.
    """

    base: str
    topk: int
    page_size: int
    kernel: str  # that must have run
    flag: str = "auto"
    heads: tuple[int, int] = (8, 2)
    window: int | None = None
    prefixes: tuple[int, ...] = (17, 1, 64, 130)

    @property
    def name(self) -> str:
        shape = "tree" if self.topk > 1 else "chain"
        return (
            f"{self.base} {shape}, page {self.page_size}" + (f", window {self.window}" if self.window else "") + f", {self.flag}"
        )


CASES = (
    KitCase("fa3", 2, 1, "fused"),
    KitCase("fa3", 2, 64, "prefix_tile", "tile"),
    KitCase("fa3", 2, 16, "prefix_tile", "tile", heads=(4, 4)),
    KitCase("fa3", 2, 1, "prefix_gather", "gather"),
    KitCase("fa3", 2, 128, "fused", "fused", heads=(16, 1)),
    KitCase("fa3", 2, 64, "fused", window=16),
    KitCase("triton", 2, 1, "fused"),
    KitCase("triton", 1, 1, "fused"),
    KitCase("triton", 1, 64, "fused", heads=(4, 4)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", default="", help="run the cases whose name has this in it")
    parser.add_argument("--out", type=Path, help="result file to write")
    args, device = parser.parse_args(), prepare()
    if device == "cpu":
        _let_linear_attention_import()
    cases = [case for case in CASES if args.case in case.name]
    rows, begin = list[dict[str, Any]](), time.monotonic()
    for case in cases:
        for graph in (False, True):
            text = "ok"
            try:
                run(case, device, graph=graph)
            except (Exception, unittest.SkipTest) as error:  # one case's failure leaves the others to run
                text = f"FAIL {type(error).__name__}\n{traceback.format_exc()}"
            rows.append({"case": asdict(case), "graph": graph, "result": text})
            print(f"{case.name:34} {'graph' if graph else 'eager'}  {case.kernel:14} {text}", flush=True)
            if args.out is not None:
                record.write(args.out, {"command": "python -m tests.gpu.sglang_kit", "device": device, "rows": rows})
    failed = sum(row["result"] != "ok" for row in rows)
    print(f"{failed} of {len(rows)} failed; {time.monotonic() - begin:.0f} s on {device}")
    return int(failed > 0)


def run(case: KitCase, device: str, *, graph: bool) -> None:
    """Run one case of the kit over the plugin's backend; raises where it, or what ran, is wrong."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods.dense_attention import DenseAttentionCase
    from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as kit

    given = DenseAttentionCase(
        name=case.name, backend=case.base, forward_mode=ForwardMode.TARGET_VERIFY, num_heads=case.heads[0],
        num_kv_heads=case.heads[1], page_size=case.page_size, prefix_lens=case.prefixes,
        extend_lens=(DRAFTS,) * len(case.prefixes), sliding_window_size=case.window,
    )  # fmt: skip
    built: list[Any] = []
    os.environ[KERNELS] = case.flag
    try:
        # Its graph runner writes prefixes to contiguous slots, whatever layout the rows have; its eager one follows them.
        layout = "contiguous" if graph else "shuffled_pages"
        with torch.no_grad(), _backends(case, kit, built), _layout(kit, layout):
            verify = kit.run_dense_spec_verify_cuda_graph_case if graph else kit.run_dense_spec_verify_case
            verify(unittest.TestCase(), given, topk=case.topk, device=device, max_context_len=512,
                   head_dim=HEAD_DIM, hidden_size=256, dtype=torch.bfloat16)  # fmt: skip
    finally:
        del os.environ[KERNELS]
    ran = {row["kernel"] for backend in built for row in backend.routes.report() if row["calls"]}
    if ran != {case.kernel}:
        raise AssertionError(f"{sorted(ran)} ran, and not {case.kernel} alone")


def _let_linear_attention_import() -> None:
    """The kit's modules for linear attentions want CPU kernels that the stand-in of sgl_kernel has not; no case uses them."""
    import sys
    from unittest.mock import MagicMock

    for method in ("gdn", "kda", "lightning", "mamba2"):
        sys.modules[f"sglang.test.kits.attention_unittest.attention_methods.{method}_attention"] = MagicMock()


@contextmanager
def _layout(kit: Any, name: str) -> Iterator[None]:
    stock = kit.build_dense_attention_fixture
    kit.build_dense_attention_fixture = partial(stock, loc_layout=name)
    try:
        yield
    finally:
        kit.build_dense_attention_fixture = stock


class _backends:
    """The kit's registry builds the plugin's backend for a case's real topk, and the kit's masks go to it."""

    def __init__(self, case: KitCase, kit: Any, built: list[Any]) -> None:
        self.case, self.kit, self.built = case, kit, built

    def __enter__(self) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        self._registry, self._stock, self._make_masks = (
            ATTENTION_BACKENDS,
            ATTENTION_BACKENDS[self.case.base],
            self.kit._make_custom_masks,
        )
        self._prepare_batch, self._fixed = self.kit._prepare_spec_verify_batch, dict[str, Any]()
        ATTENTION_BACKENDS[self.case.base] = self._create
        self.kit._prepare_spec_verify_batch = self._prepare
        self.kit._make_custom_masks = self._masks

    def __exit__(self, *_: object) -> None:
        self._registry[self.case.base] = self._stock
        self.kit._make_custom_masks, self.kit._prepare_spec_verify_batch = self._make_masks, self._prepare_batch
        for backend in self.built:
            backend.published.restore()

    def _prepare(self, case: Any, batch: Any, **kwargs: Any) -> None:
        """As SGLang's graph runner: what a capture reads has one address, and a replay is copied there."""
        self._fix(batch, "positions", "req_pool_indices", "out_cache_loc", "input_ids")
        self._prepare_batch(case, batch, **kwargs)
        self._fix(batch, "seq_lens")

    def _fix(self, batch: Any, *names: str) -> None:
        for name in names:
            given = getattr(batch, name)
            setattr(batch, name, self._fixed.setdefault(name, given).copy_(given))

    def _masks(self, case: Any, *, topk: int, device: str) -> Any:
        """The kit's [W, L + W] of each request, and the backend's own buffer, holding their [W, W]."""
        import torch

        whole, flat = self._make_masks(case, topk=topk, device=device)
        published = self.built[-1].verify_mask
        if published is None:
            return whole, flat
        bits = torch.cat([mask[:, prefix:].flatten() for mask, prefix in zip(whole, case.prefix_lens, strict=True)])
        published.buffer[: bits.numel()] = bits
        return whole, published.buffer[: bits.numel()]

    def _create(self, runner: Any) -> Any:
        import torch
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.runtime_context import get_context
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        published = get_context().override_server_args(
            speculative_algorithm="EAGLE", speculative_eagle_topk=self.case.topk, speculative_num_draft_tokens=DRAFTS,
            speculative_num_steps=DRAFTS - 1,
        )  # fmt: skip
        runner.server_args, runner.spec_algorithm = published.install(), SpeculativeAlgorithm.EAGLE
        # The kit declares any window chunked local attention too, which is another model's.
        runner.model_config.is_local_attention_model = False
        window = -1 if self.case.window is None else self.case.window
        layer = RadixAttention(self.case.heads[0], HEAD_DIM, HEAD_DIM**-0.5, self.case.heads[1], 0, sliding_window_size=window)
        runner.model = torch.nn.ModuleList([layer])
        if self.case.base == "triton":
            from sglang_specverify.backends.triton import SpecverifyTritonBackend

            backend: Any = SpecverifyTritonBackend(runner, part="target")
        else:
            from sglang_specverify.backends.flash import SpecverifyFlashAttentionBackend

            backend = SpecverifyFlashAttentionBackend(runner, part="target", fa_impl_ver=3)
        backend.published = published
        self.built.append(backend)
        return backend


if __name__ == "__main__":
    raise SystemExit(main())
