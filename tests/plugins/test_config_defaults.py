"""A model whose configuration file says all that matters starts without transformers, and is the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.dense.config import dense_config
from modelrunner.plugins import hub


def said(model_type: str, **fields: Any) -> dict[str, Any]:
    """A file of `model_type` that says just what is needed, in values that are not transformers' defaults."""
    sizes = dict.fromkeys(hub.COMMON_FIELDS, 24) | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    common = {**sizes, "hidden_act": "silu", "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "rope_theta": 77.0}
    needed = {
        "head_dim": 8,
        "sliding_window": 6,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "attention_bias": True,
        "mlp_bias": True,
    }
    return {**common, **{name: needed[name] for name in hub.FIELDS[model_type]}, "model_type": model_type, **fields}


@pytest.mark.parametrize("model_type", hub.FIELDS)
def test_a_file_that_says_all_gives_the_same_model_without_defaults(model_type: str) -> None:
    architecture = f"{model_type.capitalize()}ForCausalLM"
    config = said(model_type, architectures=[architecture])
    card = ModelCard("m", Path("m"), "safetensors", (architecture,), model_type, config)
    assert hub.with_defaults(card) == config
    filled = {**hub.transformers_defaults(config), **config}
    assert len(filled) > len(config)
    plain, full = dense_config(card), dense_config(card.with_config(filled))
    assert full.rope.parameters == {"rope_type": "default", **plain.rope.parameters}  # one meaning in two spellings
    assert plain == replace(full, rope=replace(full.rope, parameters=plain.rope.parameters))


@pytest.mark.parametrize("model_type", hub.FIELDS)
def test_a_file_that_lacks_one_field_is_filled_up(model_type: str) -> None:
    for name in (*hub.COMMON_FIELDS, *hub.FIELDS[model_type], "rope_theta"):
        assert not hub.says_all({key: value for key, value in said(model_type).items() if key != name}), name
    assert not hub.says_all({**said(model_type), "model_type": "gemma3_text"})


def test_such_a_start_does_not_import_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said("qwen3", architectures=["Qwen3ForCausalLM"])))
    code = (
        "import sys\nfrom modelrunner import LLM\n"
        f"llm = LLM({str(tmp_path)!r}, load_format='dummy', skip_tokenizer_init=True, num_gpu_blocks_override=8)\n"
        "print('transformers' in sys.modules, llm.engine.assembly.resolved.components['model_state'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "dense", "(modelrunner:dense)"]
