"""Stands for the package fa3-fwd: the function that the backend calls, computed in plain torch.

As the kernel does, it reads keys and values in whole blocks, also those after a row's last, which get weight zero; writes zeros for a row
without keys; and leaves alone the tokens that no row owns (NaN here).
"""

import torch

BLOCK = 192
calls = []


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, seqused_k, softmax_scale, causal, softcap):
    calls.append((q.shape[0], max_seqlen_q, max_seqlen_k))
    assert causal
    assert k.stride(-1) == v.stride(-1) == q.stride(-1) == 1
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == seqused_k.dtype == torch.int32
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(seqused_k) + 1
    assert int(cu_seqlens_k[-1]) <= k.shape[0]
    out = torch.full_like(q, torch.nan)
    for row, length in enumerate(seqused_k.tolist()):
        start, end = cu_seqlens_q[row : row + 2].tolist()
        first_key = int(cu_seqlens_k[row])
        assert end - start <= max_seqlen_q
        assert length <= max_seqlen_k
        keys, values = (
            t[first_key : first_key + -(-length // BLOCK) * BLOCK].float().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)
        )
        position = length - (end - start) + torch.arange(end - start)
        seen = torch.arange(keys.shape[0]) <= position[:, None]
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float() * softmax_scale, keys)
        scores = scores if softcap == 0.0 else softcap * torch.tanh(scores / softcap)
        weights = torch.where(seen, scores, -torch.inf).softmax(-1) if length else scores
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
