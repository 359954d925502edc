"""The plain-torch operations: what every device can run, and what every faster version is measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from modelrunner.hookspecs import hookimpl

if TYPE_CHECKING:
    from modelrunner.device import Device
    from modelrunner.ops import Register

MODELRUNNER_API = ">=1,<2"


@hookimpl
def kernels(register: Register, device: Device) -> None:
    from modelrunner.kernels import (
        activation,
        attention,
        automata,
        batch,
        embedding,
        linear,
        logits,
        logprobs,
        norm,
        rope,
        sampling,
        speculation,
        table,
        verification,
    )
    from modelrunner.ops import CLOSE
    from modelrunner.plugins import fusions

    exact: dict[str, list[Callable[..., Any]]] = {
        "table": [table.apply_patch, table.update_state, table.write_record],
        "batch": [batch.gather_rows, batch.gather_tokens, batch.gather_block_table, batch.slot_mapping],
        "logits": [logits.count_tokens, logits.mask_logits],
        "speculation": [
            *(speculation.spread_rows, speculation.store_drafts, speculation.draft_inputs, speculation.draft_pass),
            speculation.ngram_draft,
        ],
        "automata": [automata.draft_states, automata.mask_states, automata.walk_tokens],
        "attention": [attention.write_cache, attention.indexed_write, attention.attention_index, attention.gather_pages],
    }
    for area, functions in exact.items():
        for function in functions:
            register.op(function.__name__, function, area=area)
    register.op("paged_attention", attention.paged_attention, area="attention", tolerance=CLOSE)
    register.op("indexed_attention", attention.indexed_attention, area="attention", tolerance=CLOSE)
    register.op("segment_attention", attention.segment_attention, area="attention", tolerance=CLOSE)
    for function in (embedding.embedding, embedding.place_media, embedding.add_media, embedding.media_positions):
        register.op(function.__name__, function, area="embedding")
    register.op("rms_norm", norm.rms_norm, area="norm", tolerance=CLOSE)
    register.op("apply_rope", rope.apply_rope, area="rope", tolerance=CLOSE)
    register.op("silu_mul", activation.silu_mul, area="activation", tolerance=CLOSE)
    register.op("gelu_tanh_mul", activation.gelu_tanh_mul, area="activation", tolerance=CLOSE)
    register.op("matmul", linear.matmul, area="linear", tolerance=CLOSE)
    register.op("int8_matmul", linear.int8_matmul, area="linear", tolerance=CLOSE)
    register.op("edit_logits", logits.edit_logits, area="logits", tolerance=CLOSE)
    register.op("token_logprobs", logprobs.token_logprobs, area="logprobs", tolerance=CLOSE)
    register.op("processed_logits", logprobs.processed_logits, area="logprobs", tolerance=CLOSE)
    register.op("greedy", sampling.greedy, area="sampling")
    register.op("sample", sampling.sample, area="sampling")
    register.op("verify_drafts", verification.verify_drafts, area="verification")
    register.op("gumbel_noise", sampling.gumbel_noise, area="sampling", tolerance=CLOSE)
    register.fusion("add_rms_norm", ("rms_norm",), fusions.add_rms_norm)
    register.fusion("norm_matmul", ("rms_norm", "matmul"), fusions.norm_matmul)
    register.fusion("matmul_add", ("matmul",), fusions.matmul_add)
    register.fusion("matmul_add_in_place", ("matmul",), fusions.matmul_add_in_place)
    register.fusion("norm_gated_matmul", ("rms_norm", "matmul", "silu_mul", "gelu_tanh_mul"), fusions.norm_gated_matmul)
    rotation = ("rms_norm", "apply_rope", "indexed_write")
    register.fusion("qkv_rope_write", rotation, fusions.qkv_rope_write)
    register.fusion("qkv_attention", (*rotation, "indexed_attention"), fusions.qkv_attention)
    gathers = ("gather_rows", "gather_tokens", "gather_block_table", "slot_mapping")
    register.fusion("gather_step", gathers, fusions.gather_step)
    register.fusion("finish_step", ("update_state", "write_record"), fusions.finish_step)
    register.fusion("greedy_rows", ("greedy",), fusions.greedy_rows)
    register.fusion("sample_rows", ("sample",), fusions.sample_rows)
