"""What is read of published configurations and of both spellings of a checkpoint; what is declined, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states import qwen_vl
from modelrunner.model_states.qwen_vl.config import qwen_vl_config
from modelrunner.model_states.qwen_vl.processor import image_limits
from modelrunner.offers import Decline, Offer
from modelrunner.plugins import hub
from tests.model_states.media_worlds import Loaded, SmallTokenizer
from tests.model_states.qwen_vl.worlds import digits

IDS = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
# As in the files of Qwen2.5-VL-3B-Instruct, with the decoder's fields at the top, and of Qwen3-VL-4B-Instruct.
OLDER: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    **IDS,
}
NEWER: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    **IDS,
}


def card(config: dict[str, Any], path: Path = Path("/nowhere/at/all"), **fields: Any) -> ModelCard:
    full = {**config, **fields}
    return ModelCard("made", path, "safetensors", tuple(full["architectures"]), full["model_type"], full)


def completed(config: dict[str, Any]) -> ModelCard:
    """With what transformers adds, as an engine reads it."""
    given = card(config)
    answer = hub.model_config(given)
    assert isinstance(answer, Offer)
    return given.with_config(answer.load())


@pytest.mark.parametrize("given", [card, completed], ids=["file alone", "with transformers' defaults"])
def test_published_qwen25(given: Any) -> None:
    config = qwen_vl_config(given(OLDER))
    text, vision = config.text, config.vision
    assert (text.hidden_size, text.num_layers, text.num_kv_heads, text.head_dim, text.eps) == (2048, 36, 2, 128, 1e-6)
    assert (text.tied, text.qkv_bias, text.output_bias, text.qk_norm, set(text.windows)) == (True, True, False, False, {None})
    assert (text.rope.kind, text.rope.theta, text.rope.max_length) == ("default", 1e6, 128000)
    assert (vision.window, vision.full_layers, vision.gated, vision.deepstack, vision.position_side) == (4, (7, 15, 23, 31), True, (), 0)
    assert vision.tokens_per_second == 2
    assert config.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert not config.stamped


@pytest.mark.parametrize("given", [card, completed], ids=["file alone", "with transformers' defaults"])
def test_published_qwen3(given: Any) -> None:
    config = qwen_vl_config(given(NEWER))
    text, vision = config.text, config.vision
    assert (text.hidden_size, text.num_layers, text.num_kv_heads, text.head_dim, text.eps) == (2560, 36, 8, 128, 1e-6)
    assert (text.tied, text.qkv_bias, text.qk_norm) == (True, False, True)
    assert (text.rope.kind, text.rope.theta, text.rope.max_length) == ("default", 5e6, 262144)
    assert (vision.window, vision.gated, vision.deepstack, vision.position_side) == (0, False, (5, 11, 17), 48)
    assert config.axes == (0, 1, 2) * 20 + (0,) * 4
    assert config.stamped


def test_defaults_reach_the_parts_of_a_configuration() -> None:
    """What a file's `text_config` leaves out comes from transformers, and what it says stays."""
    short = {"num_hidden_layers": 3, "hidden_size": 64, "rms_norm_eps": 0.5}
    found = completed({**NEWER, "text_config": short}).config["text_config"]
    assert {name: found[name] for name in short} == short
    assert found["num_key_value_heads"] > 0
    assert found["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("config", "fields", "reason"),
    [
        (OLDER, {"vision_config": None}, "vision_config is None"),
        (OLDER, {"vision_config": {**OLDER["vision_config"], "hidden_act": "gelu"}}, "hidden_act is 'gelu'; the vision tower"),
        (OLDER, {"vision_config": {**OLDER["vision_config"], "window_size": 20}}, "window_size is 20 pixels; a window holds at least 28"),
        (OLDER, {"vision_config": {**OLDER["vision_config"], "fullatt_block_indexes": [32]}}, "fullatt_block_indexes is [32]"),
        (OLDER, {"vision_config": {**OLDER["vision_config"], "num_heads": 3}}, "hidden_size 1280 over 3 heads"),
        (OLDER, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section is [16, 24]; three numbers are needed"),
        (OLDER, {"image_token_id": None}, "image_token_id is None"),
        (NEWER, {"vision_config": {**NEWER["vision_config"], "num_position_embeddings": 24}}, "num_position_embeddings is 24"),
        (NEWER, {"text_config": {**NEWER["text_config"], "num_hidden_layers": 2}}, "deepstack_visual_indexes has 3 entries for 2"),
        (NEWER, {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "is not a Qwen-VL model"),
    ],
)
def test_declines_name_the_field(config: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    answer = qwen_vl.model_state(card(config, **fields))
    assert isinstance(answer, Decline)
    assert reason in answer.reason


def test_limits_come_from_the_files_beside_the_checkpoint(tmp_path: Path) -> None:
    given = card(OLDER, tmp_path)
    config = qwen_vl_config(given)
    assert image_limits(given, config) == (4 * 28 * 28, 16384 * 28 * 28)
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 3136, "max_pixels": 1003520}')
    assert image_limits(given, config) == (3136, 1003520)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 65536, "longest_edge": 131072}}')
    assert image_limits(given, config) == (65536, 131072)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as a JSON object"):
        image_limits(given, config)


def test_both_spellings_of_a_checkpoint(pair: tuple[Any, Loaded], tmp_path: Path) -> None:
    """`visual.*` and `model.*`, or `model.visual.*` and `model.language_model.*`: those that transformers did not write load the same."""
    from safetensors.torch import load_file, save_file

    _, loaded = pair
    tensors = {name: tensor for file in loaded.card.path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    older = any(name.startswith("visual.") for name in tensors)
    pairs = [("visual.", "model.visual."), ("model.", "model.language_model.")]
    changes = pairs if older else [(new, old) for old, new in pairs]
    other = {}
    for name, tensor in tensors.items():
        old, new = next(((old, new) for old, new in changes if name.startswith(old)), ("", ""))
        other[new + name.removeprefix(old)] = tensor
    assert tensors.keys() & other.keys() <= {"lm_head.weight"}
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((loaded.card.path / "config.json").read_bytes())
    again = Loaded(tmp_path, qwen_vl, SmallTokenizer(digits))
    for name, tensor in loaded.state.module.state_dict().items():
        assert torch.equal(again.state.module.state_dict()[name], tensor), name
