"""The decode function that reads lengths where the queries are."""

import torch

from . import attend, calls


def xqa_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale):
    keys, values = kv_cache
    assert query.is_contiguous()
    assert keys.shape[1] in (16, 32, 64, 128)
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert block_tables.is_contiguous()
    assert block_tables.shape[0] == query.shape[0] == seq_lens.shape[0]
    assert workspace_buffer.dtype == torch.uint8
    assert int(seq_lens.max()) <= max_seq_len
    assert bmm2_scale == 1.0
    out = torch.full_like(query, torch.nan)
    for row, length in enumerate(seq_lens.tolist()):
        k, v = (x[block_tables[row].long()].flatten(0, 1)[:length] for x in (keys, values))
        out[row : row + 1] = attend(query[row : row + 1], k, v, length - 1, bmm1_scale)
    calls.append(("decode", query.shape[0]))
    return out
