"""Stands for the package flashinfer-python: what the backend calls of it, computed in plain torch.

As there, a plan lies in memory of the wrapper, lengths come from the host, and query tokens that the plan does not name are left alone.
"""

import torch

calls = []


def attend(q, keys, values, first, scale):
    """Causal attention of q [t, H, D], the tokens from position `first` on, to keys and values [s, HK, D]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    seen = torch.arange(keys.shape[0]) <= first + torch.arange(q.shape[0])[:, None]
    scores = torch.einsum("qhd,khd->hqk", q.float() * scale, keys).where(seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)


class BatchPrefillWithPagedKVCacheWrapper:
    made = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend in ("fa2", "fa3")
        BatchPrefillWithPagedKVCacheWrapper.made += 1

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        *, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        for host in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert host.device.type == "cpu"
            assert host.dtype == torch.int32
        assert paged_kv_indices.dtype == torch.int32
        assert paged_kv_indices.shape == (int(paged_kv_indptr[-1]),)
        assert causal
        assert q_data_type == kv_data_type
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert ((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all()
        self.heads, self.scale, self.page = (num_qo_heads, num_kv_heads, head_dim_qk), sm_scale, page_size
        self.rows = [x.tolist() for x in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)]
        self.indices = paged_kv_indices

    def run(self, q, paged_kv_cache, *, out, enable_pdl):
        keys, values = paged_kv_cache
        assert (q.shape[1], keys.shape[2], keys.shape[3]) == self.heads
        assert keys.shape == values.shape
        assert keys.stride() == values.stride()
        assert keys.shape[1] == self.page
        assert out.shape == q.shape
        assert not enable_pdl
        query_start, page_start, last = self.rows
        assert query_start[-1] == q.shape[0]
        for row, tail in enumerate(last):
            begin, end = query_start[row : row + 2]
            pages = self.indices[page_start[row] : page_start[row + 1]].long()
            length = (len(pages) - 1) * self.page + tail
            k, v = (x[pages].flatten(0, 1)[:length] for x in (keys, values))
            out[begin:end] = attend(q[begin:end], k, v, length - (end - begin), self.scale)
        calls.append(("prefill", q.shape[0]))
        return out
