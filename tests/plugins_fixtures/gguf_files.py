"""GGUF files of small models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf


def begun(path: Path, arch: str, config: Any, rope_base: float) -> gguf.GGUFWriter:
    """A writer that has the sizes of a decoder. config: has them under the Hugging Face names."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope_base)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    return writer


def ended(writer: gguf.GGUFWriter) -> None:
    """Write what the writer was given, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
