"""Idefics3 and SmolVLM against transformers: processing, the vision tower, logits of whole prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from modelrunner.model_states import idefics3
from modelrunner.model_states.idefics3.config import idefics3_config
from modelrunner.testing.conformance.media import film, picture
from tests.model_states.idefics3.worlds import IMAGE, SIDES, TEXT, VISION, inputs_of_transformers, pixels_of, tags, write
from tests.model_states.media_worlds import Loaded, SmallTokenizer

IDS = [5, 17, 40, 23, 60, 31]


@pytest.fixture(scope="module", params=sorted(SIDES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Loaded]:
    folder = tmp_path_factory.mktemp(request.param)
    model = write(request.param, folder)
    return model, Loaded(folder, idefics3, SmallTokenizer(tags))


SIZES = ((100, 61), (30, 90), (24, 24), (120, 9))


@pytest.mark.parametrize("size", SIZES)
def test_an_image(size: tuple[int, int], pair: tuple[Any, Loaded]) -> None:
    """Tiles bit for bit as transformers' processor makes them; embeddings within a tolerance."""
    model, loaded = pair
    image = picture(*size)
    item = loaded.processor.process("image", image, {})
    want = loaded.processor.images.preprocess([[image]], return_tensors="pt")
    torch.testing.assert_close(pixels_of(item), want["pixel_values"], rtol=0, atol=1e-6)
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
    with torch.no_grad():
        want = model(**inputs_of_transformers(prompt, items)).logits[0]
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
