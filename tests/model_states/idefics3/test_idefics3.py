"""Idefics3 and SmolVLM against transformers: processing, the vision tower, logits of whole prompts."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from modelrunner.media import MediaItem
from modelrunner.model_states import idefics3
from modelrunner.model_states.idefics3.config import idefics3_config
from modelrunner.testing.conformance.media import film, picture
from tests.model_states.media_worlds import Loaded, SmallTokenizer, make_model

IMAGE = 90
TEXT = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 24, "patch_size": 4}
CONFIG = {"text_config": TEXT, "vision_config": {**VISION, "initializer_range": 0.15}, "scale_factor": 2, "image_token_id": IMAGE}
# Tiles of the table's size, and larger ones, whose positions are looked up in between. An image is up to three tiles wide.
SIDES = {"idefics3": 24, "smolvlm": 40}
IDS = [5, 17, 40, 23, 60, 31]


def tags(text: str) -> list[int]:
    """Ids of text between tiles: one for each tag, and one for each run of line ends."""
    parts = re.findall(r"<[^>]*>|\n+", text)
    assert "".join(parts) == text
    return [IMAGE if part == "<image>" else 64 + sum(part.encode()) % 20 for part in parts]


@pytest.fixture(scope="module", params=sorted(SIDES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Loaded]:
    model = make_model({**CONFIG, "model_type": request.param})
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    side = SIDES[request.param]
    sizes = {"size": {"longest_edge": 3 * side}, "max_image_size": {"longest_edge": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return model, Loaded(folder, idefics3, SmallTokenizer(tags))


def pixels_of(loaded: Loaded, item: MediaItem) -> torch.Tensor:
    """[1, tiles, channels, side, side], normalised."""
    vision = loaded.state.config.vision
    scale, mean, deviation = item.tensors["norm"][:, None, :, None]
    pixels = (item.tensors["pixels"].float() * scale - mean) / deviation
    across, patch = vision.patches_across, vision.patch_size
    tiles = pixels.view(-1, across, across, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(1, -1, 3, vision.side, vision.side)


SIZES = ((100, 61), (30, 90), (24, 24), (120, 9))


@pytest.mark.parametrize("size", SIZES)
def test_an_image(size: tuple[int, int], pair: tuple[Any, Loaded]) -> None:
    """Tiles bit for bit as transformers' processor makes them; embeddings within a tolerance."""
    model, loaded = pair
    image = picture(*size)
    item = loaded.processor.process("image", image, {})
    want = loaded.processor.images.preprocess([[image]], return_tensors="pt")
    torch.testing.assert_close(pixels_of(loaded, item), want["pixel_values"], rtol=0, atol=1e-6)
    with torch.no_grad():
        features = torch.cat(model.model.get_image_features(want["pixel_values"], want["pixel_attention_mask"]).pooler_output)
    assert features.std() > 0.05
    torch.testing.assert_close(loaded.encode([item]), features, rtol=1e-4, atol=1e-4)


def test_items_together_are_what_they_are_alone(pair: tuple[Any, Loaded]) -> None:
    _, loaded = pair
    items = [loaded.processor.process("image", picture(*size), {}) for size in SIZES]
    torch.testing.assert_close(loaded.encode(items), torch.cat([loaded.encode([item]) for item in items]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splitting", [True, False])
def test_the_text_between_tiles(splitting: bool, pair: tuple[Any, Loaded]) -> None:
    """That of the model's own processor in transformers."""
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

    _, loaded = pair
    item = loaded.processor.process("image", picture(100, 61), {"do_image_splitting": splitting})
    rows, columns = (2, 3) if splitting else (0, 0)
    count = loaded.state.config.vision.tokens
    names = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "image_seq_len": count}
    theirs: Any = SimpleNamespace(**names, global_image_tag="<global-img>", global_image_token="<global-img>")
    kind: Any = SmolVLMProcessor if loaded.state.config.smol else Idefics3Processor
    text = kind.replace_image_token(theirs, {"rows": [[rows]], "cols": [[columns]]}, 0)
    assert list(item.tokens) == tags(text)
    assert item.num_embeddings == count * (7 if splitting else 1) == item.embedded.sum()
    prompt = loaded.processor.expand([5, IMAGE, 6], [item])
    assert [run.length for run in prompt.runs] == [count] * (7 if splitting else 1)
    assert loaded.processor.positions(prompt, [item]) is None


def test_logits(pair: tuple[Any, Loaded]) -> None:
    """Two images of different numbers of tiles with text between."""
    model, loaded = pair
    pictures = [picture(30, 90, 1), picture(100, 61, 2)]
    items = [loaded.processor.process("image", image, {}) for image in pictures]
    prompt = loaded.processor.expand([*IDS[:3], IMAGE, *IDS, IMAGE, *IDS[:4]], items)
    pixels = torch.cat([pixels_of(loaded, item) for item in items], 1)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([prompt.token_ids]), pixel_values=pixels).logits[0]
    assert want.std() > 0.1
    torch.testing.assert_close(loaded.logits(prompt, items), want, rtol=2e-4, atol=2e-4)


def test_the_largest_item_for_the_warm_up(pair: tuple[Any, Loaded]) -> None:
    _, loaded = pair
    item = loaded.processor.dummy(10**6)
    assert item.num_embeddings == loaded.needs.media.max_embeddings // loaded.state.config.vision.tokens * loaded.state.config.vision.tokens
    assert loaded.encode([item]).isfinite().all()


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((900, 4), {}, "neither side may be more than 200 times the other"),
        ((40, 40), {"longest": 9}, "longest; Idefics3 and SmolVLM models take do_image_splitting, longest_edge"),
        ((40, 40), {"longest_edge": 10**6}, "longest_edge is 1000000; a whole number from 1 to"),
        ((40, 40), {"do_image_splitting": 1}, "do_image_splitting is 1; true or false"),
    ],
)
def test_what_is_refused(size: tuple[int, int], options: dict[str, Any], message: str, pair: tuple[Any, Loaded]) -> None:
    _, loaded = pair
    with pytest.raises(ValueError, match=message):
        loaded.processor.process("image", picture(*size), options)


def test_videos_and_a_missing_tokenizer_are_refused(pair: tuple[Any, Loaded]) -> None:
    _, loaded = pair
    with pytest.raises(ValueError, match="with images alone"):
        loaded.processor.process("video", film(2, 30, 30), {})
    with pytest.raises(ValueError, match="that needs a tokenizer"):
        loaded.state.media_processor(None).process("image", picture(30, 30), {})


def test_declines_name_the_field(pair: tuple[Any, Loaded]) -> None:
    from dataclasses import replace

    _, loaded = pair
    card = loaded.card
    for fields, reason in (
        ({"vision_config": None}, "vision_config is None"),
        ({"scale_factor": 7}, "are not whole tokens of 7 x 7 patches"),
        ({"text_config": {**TEXT, "model_type": "opt"}}, "model_type is 'opt'; the decoder can be llama"),
        ({"vision_config": {**VISION, "hidden_act": "relu"}}, "hidden_act is 'relu'"),
    ):
        with pytest.raises(ValueError, match=reason):
            idefics3_config(replace(card, config={**card.config, **fields}))
    assert np.isfinite(loaded.state.config.vision.eps)
