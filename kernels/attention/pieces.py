"""Decode attention of a CPU as one call: rows of about one length are a piece, whose keys and values are copied out of their pages first.

Letters: R rows of a piece, S keys of its longest row, HK key-value heads, G query heads of each, D head size, W = 2 * HK * D.
"""

from typing import List, Optional  # noqa: UP035 (TorchScript's spelling)

import torch
from torch.nn.functional import scaled_dot_product_attention

from modelrunner.kernels.chain import chained


@chained
def attend_pieces(
    tokens: torch.Tensor,
    places: List[torch.Tensor],  # noqa: UP006
    copies: List[torch.Tensor],  # noqa: UP006
    wide: List[torch.Tensor],  # noqa: UP006
    queries: List[torch.Tensor],  # noqa: UP006
    keys: List[torch.Tensor],  # noqa: UP006
    values: List[torch.Tensor],  # noqa: UP006
    masks: List[Optional[torch.Tensor]],  # noqa: UP006, UP045
    scale: float,
) -> torch.Tensor:
    """Attention of one layer's decode rows, a piece after the other. Returns [rows of all pieces, G, HK, D] in the queries' dtype.

    tokens: [rows of the token view, W], the layer's cache. The lists have an entry for each piece: places [R * S] int64 rows of the token
    view; copies [R * S, W] in the cache's dtype and wide, the same in the queries' (empty where these are equal), are written, and keys and
    values [R, HK, S, D] are views of what is written last; pieces may share that memory. queries [R, HK, G, D]. masks: added to the
    scores, [R, 1, 1, S], or None.
    """
    outs: List[torch.Tensor] = []  # noqa: UP006
    for i in range(len(places)):
        torch.index_select(tokens, 0, places[i], out=copies[i])
        if len(wide) > 0:
            wide[i].copy_(copies[i])
        out = scaled_dot_product_attention(queries[i], keys[i], values[i], masks[i], scale=scale)
        outs.append(out.transpose(1, 2))  # as it lies in memory
    return outs[0] if len(outs) == 1 else torch.cat(outs)


@chained
def write_rows(keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store k and v [n, HK, D] as those rows [n] int64 of a layer's keys and values [rows of the token view, HK, D], in place."""
    keys.index_copy_(0, rows, k.to(keys.dtype))
    values.index_copy_(0, rows, v.to(values.dtype))
