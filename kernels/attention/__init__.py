"""Attention over a paged cache."""

from modelrunner.kernels.attention.index import AttentionIndex, attention_index
from modelrunner.kernels.attention.reference import gather_pages, indexed_attention, indexed_write, paged_attention, write_cache
from modelrunner.kernels.attention.segments import segment_attention

__all__ = [
    "AttentionIndex",
    "attention_index",
    "gather_pages",
    "indexed_attention",
    "indexed_write",
    "paged_attention",
    "segment_attention",
    "write_cache",
]
