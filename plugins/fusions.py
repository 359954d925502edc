"""Fusions: operations that follow each other so often that a device may have one kernel for them. Each is given here as its plain chain.

`chain(ops)` builds the function from a device's operations; a fused form must compute the same within `modelrunner.ops.CLOSE`.
Dimension letters: T tokens, K inputs and N outputs of a product, HQ query heads, HK key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from modelrunner.ops import Ops

Function = Callable[..., Any]


def add_rms_norm(ops: Ops) -> Function:
    """`add_rms_norm(x, residual, weight, eps) -> (normed, x + residual)`, all [T, K]."""

    def chain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return ops.rms_norm(total, weight, eps), total

    return chain


def norm_matmul(ops: Ops) -> Function:
    """`norm_matmul(x, norm_weight, eps, weight)`: the product of the norm of x. x: [T, K], weight: [N, K]. Returns [T, N]."""

    def chain(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = ops.matmul(ops.rms_norm(x, norm_weight, eps), weight)
        return product

    return chain


def matmul_add(ops: Ops) -> Function:
    """`matmul_add(x, weight, residual)`: residual + x @ weight.T, a new tensor [T, N]. residual: [T, N], or a bias [N]."""

    def chain(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = residual + ops.matmul(x, weight)
        return total

    return chain


def matmul_add_in_place(ops: Ops) -> Function:
    """`matmul_add_in_place(x, weight, residual)`: `matmul_add`, whose result may be put where residual [T, N] is; it is returned."""
    return matmul_add(ops)


def norm_gated_matmul(ops: Ops) -> Function:
    """`norm_gated_matmul(x, norm_weight, eps, weight, activation)`: act(gate) * up of the product of the norm of x.

    x: [T, K]. weight: [2I, K], gate first. activation: the operation `silu_mul` or `gelu_tanh_mul`. Returns [T, I].
    """

    def chain(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, activation: str) -> torch.Tensor:
        gated: torch.Tensor = getattr(ops, activation)(ops.matmul(ops.rms_norm(x, norm_weight, eps), weight))
        return gated

    return chain


def qkv_rope_write(ops: Ops) -> Function:
    """`qkv_rope_write(qkv, num_heads, num_kv_heads, q_norm, k_norm, eps, cos_sin, cache, slots, index, scales=None) -> q`.

    Norms each query and key head (where weights [D] are given), rotates both, and writes keys and values into the cache.
    qkv: [T, (HQ + 2 HK) * D]. cos_sin: [T, R] float32. cache: [num_pages, tokens_per_page, 2, HK, D], a view. slots: [T] int64, -1: not
    written. index: what `attention_index` returned for these slots. scales: as in `write_cache`, given where the cache has some.
    Returns the rotated queries [T, HQ, D].
    """

    def chain(
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        index: Any,
        **scales: torch.Tensor,
    ) -> torch.Tensor:
        dim = cache.shape[-1]
        sizes = (num_heads * dim, num_kv_heads * dim, num_kv_heads * dim)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split(sizes, -1))
        if q_norm is not None:
            q, k = ops.rms_norm(q, q_norm, eps), ops.rms_norm(k, k_norm, eps)
        rotated: tuple[torch.Tensor, torch.Tensor] = ops.apply_rope(q, k, None, cos_sin)
        ops.indexed_write(cache, rotated[1], v, index, **scales)
        return rotated[0]

    return chain


def gather_step(ops: Ops) -> Function:
    """`gather_rows`, `gather_tokens`, `num_accepted` of the rows and, for each cache group, `gather_block_table` and `slot_mapping`.

    Arguments are those of the four operations. num_accepted: [R] int32 column, num_accepted_out: [N] int32. groups: (pages [R, Pmax],
    tokens per page, block table out [N, P], slots out [T]). A fused form copies at least the pages that hold a row's first seq_len tokens,
    and the first page of a dead row; what it leaves keeps its value. Readers of a block table go by seq_len.
    """

    def chain(
        rows: torch.Tensor,
        num_query: torch.Tensor,
        generations: torch.Tensor,
        query_start: torch.Tensor,
        computed: torch.Tensor,
        known: torch.Tensor,
        finished: torch.Tensor,
        generation: torch.Tensor,
        num_accepted: torch.Tensor,
        token_ids: torch.Tensor,
        query_len_out: torch.Tensor,
        computed_out: torch.Tensor,
        seq_len_out: torch.Tensor,
        samples_out: torch.Tensor,
        num_accepted_out: torch.Tensor,
        sample_index_out: torch.Tensor,
        input_ids_out: torch.Tensor,
        positions_out: torch.Tensor,
        token_row_out: torch.Tensor,
        token_valid_out: torch.Tensor,
        groups: Sequence[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]],
        num_drafts: torch.Tensor | None = None,
    ) -> None:
        columns, row_outs = (computed, known, finished, generation), (query_len_out, computed_out, seq_len_out, samples_out)
        ops.gather_rows(rows, num_query, generations, *columns, *row_outs, num_drafts)
        num_accepted_out.copy_(num_accepted.index_select(0, rows))
        token_outs = (input_ids_out, positions_out, token_row_out, token_valid_out)
        ops.gather_tokens(rows, query_start, query_len_out, computed_out, known, token_ids, *token_outs, sample_index_out)
        for pages, tokens_per_page, block_table, slots in groups:
            ops.gather_block_table(pages, rows, block_table)
            ops.slot_mapping(block_table, token_row_out, positions_out, token_valid_out, tokens_per_page, slots)

    return chain


def finish_step(ops: Ops) -> Function:
    """`finish_step(ring, counter, generations, rows, ...) -> finish`: `update_state`, whose arguments follow, then `write_record`.

    num_tokens may be None: all of a row's tokens, for a sampler without drafts, which then need not say so. num_drafted, by name alone: as
    for `write_record`.
    """

    def chain(
        ring: torch.Tensor,
        counter: torch.Tensor,
        generations: torch.Tensor,
        rows: torch.Tensor,
        query_len: torch.Tensor,
        samples: torch.Tensor,
        tokens: torch.Tensor,
        num_tokens: torch.Tensor | None,
        ok: torch.Tensor,
        *columns: torch.Tensor | None,
        num_drafted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if num_tokens is None:
            num_tokens = rows.new_full((tokens.shape[0],), tokens.shape[1])
        finish: torch.Tensor = ops.update_state(rows, query_len, samples, tokens, num_tokens, ok, *columns)
        ops.write_record(ring, counter, rows, generations, num_tokens, finish, tokens, num_drafted)
        return finish

    return chain


def greedy_rows(ops: Ops) -> Function:
    """`greedy_rows(logits, samples) -> tokens, counts, ok`: `greedy`, and how many tokens count: 1 for a row that samples and is ok.

    logits: [N, V]. samples: [N] bool. Returns tokens [N] int64, counts [N] int32, ok [N] bool.
    """

    def chain(logits: torch.Tensor, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, ok = ops.greedy(logits)
        return tokens, (samples & ok).int(), ok

    return chain


def sample_rows(ops: Ops) -> Function:
    """`sample_rows(logits, rows, samples, computed, query_len, columns...) -> tokens, counts, ok`: `sample` with rows' values gathered.

    logits: [N, V]. rows, computed, query_len: [N] int32. samples: [N] bool. The columns are arguments of `sample` for each row of the
    request table, [R]; a filter may be None. Returns as `greedy_rows` does.
    """

    def chain(
        logits: torch.Tensor,
        rows: torch.Tensor,
        samples: torch.Tensor,
        computed: torch.Tensor,
        query_len: torch.Tensor,
        **columns: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given = {name: None if column is None else column.index_select(0, rows) for name, column in columns.items()}
        tokens, ok = ops.sample(logits, position=computed + query_len, **given)
        return tokens, (samples & ok).int(), ok

    return chain


def qkv_attention(ops: Ops) -> Function:
    """`qkv_attention(*arguments of qkv_rope_write, scale, softcap, sinks, scales)`: `indexed_attention` of `qkv_rope_write`'s queries.

    Returns [T, HQ, D].
    """
    rotate = qkv_rope_write(ops)

    def chain(
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        index: Any,
        **options: Any,
    ) -> torch.Tensor:
        scales = {"scales": options["scales"]} if "scales" in options else {}
        q = rotate(qkv, num_heads, num_kv_heads, q_norm, k_norm, eps, cos_sin, cache, slots, index, **scales)
        out: torch.Tensor = ops.indexed_attention(q, cache, index, **options)
        return out

    return chain
