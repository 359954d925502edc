"""Prompts with media: placeholders, positions and logits of whole prompts, against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from modelrunner.media import Expanded, MediaItem
from modelrunner.testing.conformance.media import film, picture
from tests.model_states.media_worlds import Loaded
from tests.model_states.qwen_vl.worlds import END, IMAGE, LIMITS, START, VIDEO, inputs_of_transformers

IMAGE_MARK, VIDEO_MARK = [START, IMAGE, END], [START, VIDEO, END]
TEXT = [7, 11, 40, 23, 5, 60, 31]


def made(loaded: Loaded, *media: tuple[int, ...]) -> tuple[Expanded, list[MediaItem]]:
    """A prompt of text with images (width, height) and videos (width, height, frames) between."""
    ids, items = TEXT[:3], []
    for number, (width, height, *frames) in enumerate(media):
        if frames:
            limits = {"min_pixels": 64, "max_pixels": 64 * 40}
            items.append(loaded.processor.process("video", film(frames[0], width, height, seed=number), limits))
        else:
            items.append(loaded.processor.process("image", picture(width, height, number), LIMITS))
        ids = [*ids, *(VIDEO_MARK if frames else IMAGE_MARK), *TEXT[: number + 2]]
    return loaded.processor.expand(ids, items), items


PROMPTS = {
    "one image": ((33, 70),),
    "three images": ((57, 40), (8, 8), (120, 9)),
    "a video": ((61, 37, 5),),
    "image, video, image": ((24, 40), (40, 40, 3), (40, 24)),
}
prompts = pytest.mark.parametrize("media", list(PROMPTS.values()), ids=list(PROMPTS))


@prompts
def test_positions(media: tuple[tuple[int, ...], ...], pair: tuple[Any, Loaded]) -> None:
    """Those of transformers' get_rope_index, and the next position as well."""
    model, loaded = pair
    prompt, items = made(loaded, *media)
    given = inputs_of_transformers(prompt, items)
    grids = {name: given[name] for name in ("image_grid_thw", "video_grid_thw") if name in given}
    want, delta = model.model.get_rope_index(given["input_ids"], mm_token_type_ids=given["mm_token_type_ids"], **grids)
    positions = loaded.processor.positions(prompt, items)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(positions, want[:, 0].numpy())
    assert positions.max() + 1 - positions.shape[1] == int(delta)
    assert (positions[1] != positions[2]).any()


@prompts
def test_logits(media: tuple[tuple[int, ...], ...], pair: tuple[Any, Loaded]) -> None:
    model, loaded = pair
    prompt, items = made(loaded, *media)
    with torch.no_grad():
        want = model(**inputs_of_transformers(prompt, items)).logits[0]
    assert want.std() > 0.1
    torch.testing.assert_close(loaded.logits(prompt, items), want, rtol=2e-4, atol=2e-4)


def test_logits_of_text_alone(pair: tuple[Any, Loaded]) -> None:
    model, loaded = pair
    with torch.no_grad():
        want = model(input_ids=torch.tensor([TEXT * 3])).logits[0]
    torch.testing.assert_close(loaded.logits(Expanded(TEXT * 3, ()), []), want, rtol=1e-4, atol=1e-4)


def test_the_longest_text_behind_a_slow_video_goes_on_after_its_last_time(pair: tuple[Any, Loaded]) -> None:
    """One frame in two seconds is two temporal patches 8 steps apart: further than the frame is wide. Text goes on behind the largest
    position so far, as the model's authors have it (transformers from 5.3 to 5.24 goes on behind the width)."""
    _, loaded = pair
    if loaded.state.config.stamped:
        pytest.skip("frames stand apart: there is no such video")
    item = loaded.processor.process("video", film(4, 40, 40, fps=0.5), {"min_pixels": 64, "max_pixels": 64 * 40})
    prompt = loaded.processor.expand([7, VIDEO, 11, 5], [item])
    positions = loaded.processor.positions(prompt, [item])
    assert item.info["grid"] == (2, 10, 10)
    assert positions[0, 1:51].tolist() == [1] * 25 + [9] * 25
    assert positions[:, 51:].tolist() == [[10, 11]] * 3


def test_times_between_steps_are_rounded_down(pair: tuple[Any, Loaded]) -> None:
    """Three frames a second: temporal patches are 4/3 steps apart."""
    _, loaded = pair
    if loaded.state.config.stamped:
        pytest.skip("frames stand apart: times take no positions")
    item = loaded.processor.process("video", film(10, 16, 16, fps=3.0), {"min_pixels": 256, "max_pixels": 256})
    positions = loaded.processor.positions(loaded.processor.expand([7, 8, VIDEO, 9], [item]), [item])
    assert (positions[0, 2:22:4] - 2).tolist() == [0, 1, 2, 4, 5]


def test_times_of_frames_are_in_the_text(pair: tuple[Any, Loaded]) -> None:
    """Qwen3-VL: before each temporal patch the mean of its frames' times; the last frame counts twice when there is an odd one."""
    _, loaded = pair
    if not loaded.state.config.stamped:
        pytest.skip("videos are one run")
    item = loaded.processor.process("video", film(3, 16, 16, fps=4.0), {"min_pixels": 64, "max_pixels": 64 * 40})
    frame = item.num_embeddings // 2
    encode = loaded.processor.tokenizer.encode
    want = [*encode("<0.1 seconds>"), START, *[VIDEO] * frame, END, *encode("<0.5 seconds>"), START, *[VIDEO] * frame, END]
    assert list(item.tokens) == want
    assert item.embedded.tolist() == [token == VIDEO for token in want]
    prompt = loaded.processor.expand([7, *VIDEO_MARK, 9], [item])
    assert prompt.token_ids == [7, *want, 9]
    assert [run.length for run in prompt.runs] == [frame, frame]
    assert loaded.processor.expand(prompt.token_ids, [item]) == prompt  # expanded already
    loaded.processor.tokenizer, kept = None, loaded.processor.tokenizer
    try:
        with pytest.raises(ValueError, match="that needs a tokenizer"):
            loaded.processor.process("video", film(3, 16, 16), {})
    finally:
        loaded.processor.tokenizer = kept


def test_an_expanded_prompt_is_taken_as_it_is(pair: tuple[Any, Loaded]) -> None:
    _, loaded = pair
    prompt, items = made(loaded, (33, 70), (16, 8))
    assert loaded.processor.expand(prompt.token_ids, items) == prompt
    with pytest.raises(ValueError, match="has 1 places for an item of kind 'image'"):
        loaded.processor.expand([7, IMAGE, 9], items)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((900, 4), {}, "neither side may be more than 200 times the other"),
        ((40, 40), {"max_pixel": 9}, "max_pixel; Qwen-VL models take min_pixels, max_pixels"),
        ((40, 40), {"min_pixels": 800, "max_pixels": 64}, "min_pixels is 800, max_pixels 64"),
        ((40, 40), {"max_pixels": True}, "max_pixels True"),
        ((800, 800), {"min_pixels": 64, "max_pixels": 10**6}, "takes 10000 tokens; 512 are the most"),
    ],
)
def test_what_is_refused(size: tuple[int, int], options: dict[str, Any], message: str, pair: tuple[Any, Loaded]) -> None:
    _, loaded = pair
    with pytest.raises(ValueError, match=message):
        loaded.processor.process("image", picture(*size), options)


def test_frames_too_far_apart_are_refused(pair: tuple[Any, Loaded]) -> None:
    """Positions beyond the number of tokens would leave the rotary table."""
    _, loaded = pair
    if loaded.state.config.stamped:
        pytest.skip("frames stand apart: times take no positions")
    item = loaded.processor.process("video", film(20, 8, 8, fps=0.1), {"min_pixels": 64, "max_pixels": 64})
    with pytest.raises(ValueError, match="would reach position 361: frames of a video are too far apart"):
        loaded.processor.positions(loaded.processor.expand([7, VIDEO], [item]), [item])
