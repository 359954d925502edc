"""What the Gemma 3 plugin takes and refuses, its cache groups, the older spelling of its configuration, and rounding in bfloat16."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.kernels.norm import rms_norm
from modelrunner.model_states import gemma3
from modelrunner.model_states.gemma3.config import gemma3_config
from modelrunner.model_states.gemma3.layers import ScaledEmbedding, cache_groups
from modelrunner.offers import Decline, Offer
from modelrunner.plugins import hub

# As the hub has it for the 4B model's text part, in the spelling of its time, and smaller.
OLDER: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


def card(**fields: Any) -> ModelCard:
    config = {**OLDER, **fields}
    return ModelCard("tiny", Path("tiny"), "safetensors", tuple(config["architectures"]), "gemma3_text", config)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration is not a Gemma 3 text model"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; Gemma 3 models run with gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True (attention to later tokens)"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0 (a cap on attention scores)"),
        ({"head_dim": None}, "head_dim is None in the configuration"),
        ({"sliding_window": None}, "sliding_window is None in the configuration"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 12 layers"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters have ['rope_theta']"),
        ({"rope_parameters": {"full_attention": {"rope_type": "axial"}}}, "full_attention: rope_type is 'axial'"),
        ({"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}, "sliding_attention: 8 of 16 components rotate"),
    ],
)
def test_declines_name_the_field(fields: dict[str, Any], reason: str) -> None:
    answer = gemma3.model_state(card(**fields))
    assert isinstance(answer, Decline)
    assert reason in answer.reason


def test_takes_text_models() -> None:
    assert isinstance(gemma3.model_state(card()), Offer)


def test_groups_are_five_sliding_to_one_full() -> None:
    groups = {group.name: group for group in cache_groups(gemma3_config(card()))}
    assert {name: (group.layers, group.window) for name, group in groups.items()} == {
        "full": ((5, 11), None),
        "sliding": ((0, 1, 2, 3, 4, 6, 7, 8, 9, 10), 32),
    }
    assert {group.scale for group in groups.values()} == {0.25}


@pytest.mark.parametrize("completed", [False, True], ids=["file alone", "with transformers' defaults"])
def test_older_spelling_of_rope(completed: bool) -> None:
    """With and without what transformers adds, which is the newer spelling beside the older one."""
    given = card()
    if completed:
        answer = hub.model_config(given)
        assert isinstance(answer, Offer)
        given = given.with_config(answer.load())
        assert "full_attention" in given.config["rope_parameters"]
    ropes = gemma3_config(given).ropes
    assert {name: (rope.kind, rope.theta) for name, rope in ropes.items()} == {"full": ("linear", 1e6), "sliding": ("default", 1e4)}
    assert ropes["full"].factor == 8.0
    assert gemma3_config(given).max_length == 512  # the positions that the configuration names are the stretched ones


def test_rounding_is_that_of_transformers_in_bfloat16() -> None:
    """Norms multiply before they round, and the factor on embeddings is itself rounded: bit for bit."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding

    torch.manual_seed(0)
    x = torch.randn(50, 96, dtype=torch.bfloat16)
    norm = Gemma3RMSNorm(96).to(torch.bfloat16)
    norm.weight.data.normal_()
    assert torch.equal(rms_norm(x, norm.weight.float() + 1.0, 1e-6), norm(x))
    theirs = Gemma3TextScaledWordEmbedding(97, 3072, 0, 3072**0.5).to(torch.bfloat16)
    ops = SimpleNamespace(embedding=lambda ids, weight, out: out.copy_(weight[ids]))
    ours = ScaledEmbedding(SimpleNamespace(ops=ops, dtype=torch.bfloat16, device=torch.device("cpu")), 97, 3072)  # type: ignore[arg-type]
    ours.weight.data.copy_(theirs.weight)
    ids, out = torch.arange(97), torch.empty(97, 3072, dtype=torch.bfloat16)
    ours(ids, out)
    assert torch.equal(out, theirs(ids))
