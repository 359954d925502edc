"""FlashInfer (Ye et al. 2025, arXiv:2501.01005): prompts by its paged prefill, decode rows by its XQA kernels.

Its prefill is planned on the host, from the exact lengths of all rows. Those of prompts the host knows; those of decode rows only the
device does, while steps are in flight. So prompts are planned from `AttentionMeta.prompts`, and decode rows run by kernels that read their
lengths on the device, which a graph can capture. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from modelrunner.attention import AttentionMeta
from modelrunner.backends.split import SplitAttention
from modelrunner.batch import Prompts
from modelrunner.model_state import FullAttention
from modelrunner.ops import Ops

HOPPER = 9  # major compute capability
XQA_CAPABILITIES = (9, 10, 12)  # major
XQA_PAGES = (16, 32, 64, 128)  # tokens
XQA_BYTES = 40 << 20  # of which 8 MiB are semaphores, zeros between launches
PLAN_BYTES = 8 << 20  # that FlashInfer reserves for a plan, on the device and in pinned memory
WORK_BYTES = 28  # of a plan, for a tile of queries of one head
TILE = 64  # query tokens of a tile, at least
SPLIT_BYTES = 128 << 20  # for partial results of the kernels of other GPUs; Hopper's have none
FIRST_PLANNERS = 3  # for two steps in flight and the next


class DecodeRows(NamedTuple):
    """block_table: [N, pages] int32. lengths: [N] int32, of which FlashInfer reads the bits as uint32. max_seq_len: bounds them."""

    block_table: torch.Tensor
    lengths: torch.Tensor
    max_seq_len: int


class PromptRows(NamedTuple):
    """first, end: their tokens in the step. wrapper: with a plan of them."""

    first: int
    end: int
    wrapper: Any


@dataclass
class Planner:
    """A wrapper of FlashInfer, and when its last plan has left pinned memory (None: nothing to wait for)."""

    wrapper: Any
    copied: Any = None

    @property
    def idle(self) -> bool:
        return self.copied is None or bool(self.copied.query())


@dataclass
class Planners:
    """Wrappers that share their memory for partial results. A plan lies in the wrapper's pinned memory until the device has copied it, so
    steps in flight need one each."""

    device: torch.device
    split: torch.Tensor
    kernels: str
    all: list[Planner] = field(default_factory=list)

    def add(self) -> Planner:
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(self.split, "NHD", backend=self.kernels)
        planner = Planner(wrapper)
        self.all.append(planner)
        return planner

    def plan(self, **arguments: Any) -> Any:
        """Plan with a wrapper that is free, and return it."""
        planner = next((p for p in self.all if p.idle), None) or self.add()
        planner.wrapper.plan(**arguments)
        if self.device.type == "cuda":
            planner.copied = planner.copied or torch.cuda.Event()
            planner.copied.record()
        return planner.wrapper


class FlashInfer(SplitAttention):
    """Steps made for a graph run their prompts as `PagedAttention`, and so does a step whose prompts' lengths only the device has."""

    def __init__(self, group: FullAttention, cache: torch.Tensor, ops: Ops, dtype: torch.dtype) -> None:
        """Loads the kernels, which FlashInfer may have to compile first."""
        super().__init__(group, cache, ops, dtype)
        device = cache.device
        major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else HOPPER
        self._xqa = import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
        decodes = major in XQA_CAPABILITIES and cache.shape[2] in XQA_PAGES
        self._workspace = torch.zeros(XQA_BYTES, dtype=torch.uint8, device=device) if decodes else None
        kernels, num_bytes = ("fa3", 1 << 20) if major == HOPPER else ("fa2", SPLIT_BYTES)
        self._planners = Planners(device, torch.empty(num_bytes, dtype=torch.uint8, device=device), kernels)
        for _ in range(FIRST_PLANNERS):
            self._planners.add()
        self._try()

    def _try(self) -> None:
        """Run each kernel once, over the null page, so that it is loaded."""
        device = self.cache.device
        q = torch.zeros(1, self.group.num_heads, self.group.head_dim, dtype=self.dtype, device=device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        one = np.ones(1, np.int32)
        self.attend_prompts(q, 0, self._plan(table, Prompts(one, one), 0))
        if self._workspace is not None:
            self.attend_decode(q, 0, DecodeRows(table, torch.ones(1, dtype=torch.int32, device=device), 1))

    def begin_prompts(self, meta: AttentionMeta) -> PromptRows | None:
        prompts = meta.prompts
        if prompts is None or self._plan_bytes(prompts) > PLAN_BYTES:
            return None
        return self._plan(meta.block_table[meta.num_decode :], prompts, meta.num_decode * meta.decode_query)

    def _plan_bytes(self, prompts: Prompts) -> int:
        """Bounds the size of a plan."""
        tiles = int(prompts.query.sum()) // TILE + prompts.query.size
        return WORK_BYTES * tiles * self.group.num_heads

    def _plan(self, block_table: torch.Tensor, prompts: Prompts, first: int) -> PromptRows:
        """Plan the rows of `prompts`, whose tokens begin at `first`, and whose pages are the first rows of block_table."""
        group, device, page = self.group, self.cache.device, self.cache.shape[2]
        query_start, pages = starts(prompts.query), -(-prompts.length // page)
        page_start = starts(pages)
        total = int(page_start[-1])
        counts, begins = (torch.from_numpy(a).to(device, non_blocking=True) for a in (pages, page_start[:-1].copy()))
        row = torch.repeat_interleave(torch.arange(pages.size, device=device), counts, output_size=total)
        column = torch.arange(total, device=device) - begins[row]
        wrapper = self._planners.plan(
            qo_indptr=torch.from_numpy(query_start),
            paged_kv_indptr=torch.from_numpy(page_start),
            paged_kv_indices=block_table[row, column],
            paged_kv_last_page_len=torch.from_numpy(prompts.length - (pages - 1) * page),
            num_qo_heads=group.num_heads,
            num_kv_heads=group.num_kv_heads,
            head_dim_qk=group.head_dim,
            page_size=page,
            causal=True,
            sm_scale=group.scale,
            q_data_type=self.dtype,
            kv_data_type=self.cache.dtype,
        )
        return PromptRows(first, first + int(query_start[-1]), wrapper)

    def attend_prompts(self, q: torch.Tensor, layer: int, prompts: PromptRows) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        tokens = slice(prompts.first, prompts.end)
        prompts.wrapper.run(q[tokens], self._keys_and_values(layer), out=out[tokens], enable_pdl=False)
        out[prompts.end :] = 0
        return out.flatten(1)

    def begin_decode(self, meta: AttentionMeta) -> DecodeRows | None:
        if self._workspace is None or meta.decode_query > 1:
            return None
        # A dead row attends to the first token of the null page: of no keys at all, the result would not be finite.
        table = torch.where((meta.seq_len > 0)[:, None], meta.block_table, 0)
        return DecodeRows(table, meta.seq_len.clamp(min=1), meta.max_seq_len)

    def attend_decode(self, q: torch.Tensor, layer: int, decode: DecodeRows) -> torch.Tensor:
        out: torch.Tensor = self._xqa(
            q.contiguous(),
            self._keys_and_values(layer),
            self._workspace,
            decode.block_table,
            decode.lengths,
            decode.max_seq_len,
            bmm1_scale=self.group.scale,
            bmm2_scale=1.0,
        )
        return out

    def _keys_and_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer, [pages, tokens_per_page, num_kv_heads, head_dim] each."""
        keys, values = self.cache[:, layer].unbind(2)
        return keys, values


def starts(counts: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Where each of some runs begins, and where the last one ends: [n + 1] int32."""
    result = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=result[1:])
    return result
