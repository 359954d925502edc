"""What the dense plugin takes and refuses, and the lengths that rope scaling gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states import dense
from modelrunner.model_states.common.rope_spec import rope_spec
from modelrunner.model_states.dense.config import dense_config
from modelrunner.offers import Decline, Offer

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def card(**fields):
    config = {**LLAMA, **fields}
    return ModelCard("tiny", Path("tiny"), "safetensors", tuple(config["architectures"]), "llama", config)


def test_takes_its_architectures():
    for architecture in dense.ARCHITECTURES:
        assert isinstance(dense.model_state(card(architectures=[architecture])), Offer)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": []}, "architecture not named"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; dense models run with silu"),
        ({"hidden_size": None}, "hidden_size is None in the configuration"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope_type is 'axial'; supported are default, linear, llama3, yarn, longrope"),
        ({"rope_scaling": {"type": "su"}}, "rope_type is 'longrope', which needs short_factor, long_factor in rope_parameters"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 5}},
            "rope_parameters have {'long_factor': 5} entries; 4 are needed",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "which needs factor in rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor makes 4 of 8"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["chunked_attention"] * 3,
            },
            "layer_types has 3 entries for 3 layers, and these kinds that dense models lack: ['chunked_attention']",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]},
            "layer_types has 1 entries for 3 layers",
        ),
    ],
)
def test_declines_name_the_field(fields, reason):
    answer = dense.model_state(card(**fields))
    assert isinstance(answer, Decline)
    assert reason in answer.reason


@pytest.mark.parametrize("eps", [-1e-5, 0.0, float("nan"), float("inf")])
def test_an_epsilon_that_is_none_is_declined(eps):
    """A negative one gave NaN for small hidden states."""
    answer = dense.model_state(card(rms_norm_eps=eps))
    assert isinstance(answer, Decline)
    assert f"tiny: rms_norm_eps is {eps}; a finite number above 0 is needed" in answer.reason


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 4}, [None] * 3),  # Llama has none
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4}, [4] * 3),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, [None] * 3),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 4}, [4] * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4, "max_window_layers": 1}, [None] * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4, "max_window_layers": 2, "use_sliding_window": True}, [None, None, 4]),
    ],
)
def test_windows(fields, windows):
    assert list(dense_config(card(**fields)).windows) == windows


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16}, 128),
    ],
)
def test_longest_request(rope, length):
    assert rope_spec({"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 1e4, **rope}}, 8).max_length == length


def test_offers_need_no_torch():
    program = """
import sys
from pathlib import Path
from modelrunner.checkpoint import ModelCard
from modelrunner.model_states import dense
from modelrunner.offers import Offer
CONFIG = %r
assert isinstance(dense.model_state(ModelCard("m", Path("m"), "safetensors", ("LlamaForCausalLM",), "llama", CONFIG)), Offer)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-P", "-c", program % LLAMA], check=True, timeout=120)
