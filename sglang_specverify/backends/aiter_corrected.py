"""SGLang's aiter backend with what it hands to aiter's kernels corrected. Import only in a scheduler process.

Faults of SGLang 0.5.22 and 0.5.23, each corrected where it says; when SGLang mends one, its part goes:

- A draft step passes the prefix's length, so its query misses the tokens drafted before it, and itself: `_as_aiter_reads`.
- Tables, lists and paged attention's partitions end at the context, and the drafts of a request near it lie behind: `_widen`.
- Paged attention's workspace ends at the request pool, and a batch may be padded past it: `_make_room`.
- A draft's graph over a window pool has room for the write slots of one step, and is given those of all: a replay of more than
  `max_bs / steps` requests is an error: `init_cuda_graph_state`.
- Three builders of page tables, one per caller, which write beyond a row and leave what lies before a pool: `page_table`.
- The older verify drops the scales of an FP8 cache, the window and the sinks, and reads the full pool for window layers; where
  the pool scales K and V in place, it reads the scaled ones: `_older_verify`.
- The kernel that writes an FP8 cache, or one beside a window pool, takes heads and slots to lie side by side: a KV head that is
  expanded to several is read beside its end (`_dense`), and of the slots of a chain's draft step, which are every n-th of a list,
  all requests but the first take another's (`_as_aiter_reads`). Beside a window pool it also gives V the head dim of K
  (`_write_v`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.aiter_backend import AiterAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_specverify import flags
from sglang_specverify.backends.facts import padded
from sglang_specverify.kernels import page_table_of_ragged, page_table_of_rows
from sglang_specverify.kernels.checks import FP8

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

#: Rows of a table hold whole tiles of aiter's kernels, which read the entries of a tile before they know which of them count.
_TILE = 128

#: Keys of a partition of aiter's paged attention, as SGLang asks for it.
_PARTITION = 256

#: Where `extend_attention_fwd` takes them among its positional arguments.
_K, _V, _KV_INDPTR, _KV_INDICES, _K_SCALE, _V_SCALE = 1, 2, 7, 8, 13, 14


class CorrectedAiterBackend(AiterAttnBackend):
    """As SGLang's for MLA, for plain decode and for prefill.

    `SGLANG_SPECVERIFY_AITER_VERIFY` and `_CHAIN` leave verify and draft extend as they are, `_DRAFT_DECODE` draft steps.
    """

    #: Set by the built-in backend.
    max_context_len: int
    max_num_partitions: int
    workspace_buffer: torch.Tensor
    extend_attention_fwd: Callable[..., Any]

    def __init__(self, model_runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        read = flags.read()
        self._corrects_verify = read.aiter_verify and read.chain
        self._corrects_drafts = read.draft_decode
        #: Positions of each row of a draft step, int64: its own for an eager step, of fixed address in graphs; else None.
        self._row_lens: torch.Tensor | None = None
        self._graph_row_lens: torch.Tensor | None = None
        #: The layer, the sinks and the K and V, before the pool scaled them, of the call that may reach the older verify.
        self._call: tuple[RadixAttention, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None = None
        self._stock_extend = self.extend_attention_fwd
        if self._corrects_verify:
            self.extend_attention_fwd = self._older_verify
        self._widen()

    def _widen(self) -> None:
        """Let every table and list that SGLang sizes by the context hold a request's drafts behind it, in whole tiles."""
        if self.use_mla:
            return
        drafts = max(self.num_draft_tokens or 0, self.topk * (self.speculative_num_steps or 0))
        self.max_context_len = -(-(self.max_context_len + drafts) // _TILE) * _TILE
        self.max_num_partitions = max(self.max_num_partitions, -(-self.max_context_len // _PARTITION))
        self._make_room(padded(self.req_to_token_pool.size))

    def _make_room(self, requests: int) -> None:
        """Let paged attention's workspace hold so many requests, which SGLang sizes by the request pool."""
        if self.use_mla or self.use_triton_unified_attention:
            return
        # Of each request, head and partition the partial output, and the sum and the maximum of its weights, in FP32.
        size = requests * self.num_head * self.max_num_partitions * (self.head_dim + 2) * 4
        if size > self.workspace_buffer.numel():
            self.workspace_buffer = torch.empty(size, dtype=torch.uint8, device=self.device)

    # Metadata.

    def _reads_tables(self) -> bool:
        """Whether steps of a draft read a page table; 0.5.22 asks for unified attention alone."""
        return bool(getattr(self, "decode_uses_page_table", self.use_triton_unified_attention)) and not self.use_mla

    def _rows_of_draft(self, forward_batch: ForwardBatch) -> int:
        """Rows of a draft step whose slots came as a ragged list and whose lengths are to be corrected; else 0."""
        spec, mode = forward_batch.spec_info, forward_batch.forward_mode
        if not (self._corrects_drafts and self._reads_tables() and mode.is_decode()) or spec is None:
            return 0
        starts = getattr(spec, "kv_indptr", None)
        return 0 if starts is None else len(starts) - 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        rows = self._rows_of_draft(forward_batch)
        self._row_lens = torch.zeros(rows, dtype=torch.int64, device=self.device) if rows else None
        super().init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        self._make_room(max_bs)
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
        self._graph_row_lens = torch.zeros(max_bs, dtype=torch.int64, device=self.device)
        if self.use_sliding_window_kv_pool and not self.use_mla:
            # A draft's metadata translates the write slots of all its steps, and SGLang makes room for those of one.
            slots = max_num_tokens * max(1, self.speculative_num_steps or 0)
            self.cuda_graph_swa_out_cache_loc = torch.zeros(slots, dtype=torch.int64, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        rows = self._rows_of_draft(forward_batch)
        # A captured graph keeps the address: this writes the lengths of a replay in their place.
        self._row_lens = self._graph_row_lens[:rows] if rows and self._graph_row_lens is not None else None
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def _build_unified_page_table_from_spec(
        self,
        spec_info: Any,
        bs: int,
        dest_buf: torch.Tensor | None = None,
        swa_dest_buf: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        drafting = self._row_lens is not None
        if not (drafting or self._corrects_verify):
            found: tuple[torch.Tensor, torch.Tensor | None] = super()._build_unified_page_table_from_spec(
                spec_info, bs, dest_buf, swa_dest_buf
            )
            return found
        # What SGLang cuts out of a graph's list counts real requests alone, and the padded ones have slots too.
        slots = self.cuda_graph_kv_indices if drafting and dest_buf is not None else spec_info.kv_indices
        tables = self._tables(bs, dest_buf, swa_dest_buf)
        page_table_of_ragged(slots, spec_info.kv_indptr[: bs + 1], row_lens=self._row_lens, **tables)
        return tables["table"], tables.get("window_table")

    def _build_verify_unified_metadata(
        self,
        bs: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        draft_num: int,
        page_table_dest: torch.Tensor | None = None,
        swa_page_table_dest: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
        if not self._corrects_verify:
            found: tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None] = super()._build_verify_unified_metadata(
                bs, seq_lens, req_pool_indices, draft_num, page_table_dest, swa_page_table_dest
            )
            return found
        offsets = self.qo_indptr[: bs + 1]
        torch.arange(0, (bs + 1) * draft_num, draft_num, out=offsets)
        tables = self._tables(bs, page_table_dest, swa_page_table_dest)
        page_table_of_rows(self.req_to_token, req_pool_indices[:bs], seq_lens[:bs], extra=draft_num, **tables)
        return tables["table"], offsets, draft_num, tables.get("window_table")

    def _tables(self, bs: int, table: torch.Tensor | None, window_table: torch.Tensor | None) -> dict[str, Any]:
        """The page size and the tables that a builder fills: those of a graph, or new ones."""

        def new() -> torch.Tensor:
            width = -(-self.max_context_len // self.page_size)
            return torch.zeros(bs, width, dtype=torch.int32, device=self.device)

        made: dict[str, Any] = {"page_size": self.page_size, "table": new() if table is None else table}
        if self.use_sliding_window_kv_pool:
            made["slot_map"] = self.swa_kv_pool.full_to_swa_index_mapping
            made["window_table"] = new() if window_table is None else window_table
        return made

    # Layers.

    def _as_aiter_reads(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """A draft step's batch, with the lengths of its own rows in place of the prefix's, and its write slots side by side."""
        view = copy.copy(forward_batch)
        view.out_cache_loc = forward_batch.out_cache_loc.contiguous()
        if self._row_lens is not None:
            view.seq_lens = self._row_lens
        return view

    def _write_v(  # type: ignore[no-untyped-def]
        self, k, v, layer, forward_batch, save_kv_cache
    ) -> bool:
        """Write K and V through the pool where SGLang would give V the head dim of K; whether anything is left to write."""
        same = layer.qk_head_dim == layer.v_head_dim or not (self._corrects_verify or self._corrects_drafts)
        if same or not self.use_sliding_window_kv_pool or self.kv_cache_is_vectorized_5d or not save_kv_cache or k is None:
            return bool(save_kv_cache)
        slots = forward_batch.out_cache_loc
        where = KVWriteLoc(slots, self.swa_kv_pool.translate_loc_from_full_to_swa(slots))
        scales = (layer.k_scale, layer.v_scale) if self.kv_cache_dtype in FP8 and layer.k_scale is not None else ()
        self.token_to_kv_pool.set_kv_buffer(layer, where, k.clone() if scales else k, v.clone() if scales else v, *scales)
        return False

    def forward_decode(  # type: ignore[no-untyped-def]
        self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs
    ):
        save_kv_cache = self._write_v(k, v, layer, forward_batch, save_kv_cache)
        if self._corrects_drafts and forward_batch.spec_info is not None and not self.use_mla:
            k, v, forward_batch = _dense(k), _dense(v), self._as_aiter_reads(forward_batch)
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_extend(  # type: ignore[no-untyped-def]
        self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs
    ):
        mode = forward_batch.forward_mode
        save_kv_cache = self._write_v(k, v, layer, forward_batch, save_kv_cache)
        if self.use_mla or not (self._corrects_verify and (mode.is_target_verify() or mode.is_draft_extend_v2())):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        k, v = _dense(k), _dense(v)
        in_place = layer.k_scale is not None and not self._use_unified_verify and mode.is_target_verify()
        fresh = (k.clone(), v.clone()) if in_place and k is not None and v is not None else (None, None)
        self._call = (layer, kwargs.get("sinks"), *fresh)
        try:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        finally:
            self._call = None

    def _older_verify(self, *arguments: Any, **options: Any) -> Any:
        """SGLang's `extend_attention_fwd` with what the verify of this call leaves out."""
        assert self._call is not None, "SGLang calls this from forward_extend alone"
        layer, sinks, k, v = self._call
        given = list(arguments)
        if k is not None and v is not None:
            given[_K], given[_V] = k, v
        if self.kv_cache_dtype in FP8 and layer.k_scale is not None:
            given[_K_SCALE], given[_V_SCALE] = layer.k_scale_float, layer.v_scale_float
        window = layer.sliding_window_size
        if window is not None and window > -1:
            options["sliding_window_size"] = window
            # The mask's rows begin at position 0, not at the window.
            options["window_kv_offsets"] = torch.zeros_like(given[_KV_INDPTR])
            if self.use_sliding_window_kv_pool and self.swa_kv_pool.layers_mapping[layer.layer_id][1]:
                given[_KV_INDICES] = self.swa_kv_pool.translate_loc_from_full_to_swa(given[_KV_INDICES])
        return self._stock_extend(*given, sinks=sinks, **options)


def _dense(value: torch.Tensor | None) -> torch.Tensor | None:
    """K or V [tokens, heads, dim] with its heads side by side."""
    if value is None or value.dim() < 3 or (value.stride(-1) == 1 and value.stride(-2) == value.shape[-1]):
        return value
    return value.contiguous()
