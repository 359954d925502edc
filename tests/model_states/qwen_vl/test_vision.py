"""The vision tower alone: embeddings of images and videos against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from modelrunner.testing.conformance.media import film, picture
from tests.model_states.media_worlds import Loaded
from tests.model_states.qwen_vl.worlds import LIMITS, pixels_of

SIZES = ((33, 70), (8, 8), (57, 40), (120, 9), (48, 48))  # width and height in pixels


def theirs(model: Any, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """[embeddings, width]: the embedding, then DeepStack's features."""
    with torch.no_grad():
        out = model.model.visual(pixels, grid_thw=torch.tensor([grid]))
    return torch.cat((out.pooler_output, *(getattr(out, "deepstack_features", None) or [])), -1)


def test_images_go_through_the_processor_of_transformers(pair: tuple[Any, Loaded]) -> None:
    """What reaches the tower is bit for bit what transformers' processor would have given it."""
    _, loaded = pair
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, number)
        item = loaded.processor.process("image", image, LIMITS)
        size = {"shortest_edge": LIMITS["min_pixels"], "longest_edge": LIMITS["max_pixels"]}
        want = loaded.processor.images.preprocess([image], size=size, return_tensors="pt")
        assert want["image_grid_thw"].tolist() == [list(item.info["grid"])]
        torch.testing.assert_close(pixels_of(item), want["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_of_an_image(size: tuple[int, int], pair: tuple[Any, Loaded]) -> None:
    model, loaded = pair
    item = loaded.processor.process("image", picture(*size), LIMITS)
    want = theirs(model, pixels_of(item), item.info["grid"])
    assert want.std() > 0.1
    torch.testing.assert_close(loaded.encode([item]), want, rtol=1e-4, atol=1e-4)


def test_embeddings_of_a_video(pair: tuple[Any, Loaded]) -> None:
    """Five frames of awkward size: three temporal patches, in the last of which the fifth frame stands twice."""
    model, loaded = pair
    item = loaded.processor.process("video", film(5, 61, 37), {"min_pixels": 64, "max_pixels": 64 * 40})
    assert item.info["grid"][0] == 3
    last = pixels_of(item).unflatten(1, (3, 2, -1))[-item.info["grid"][1] * item.info["grid"][2] :]
    assert torch.equal(last[:, :, 0], last[:, :, 1])
    torch.testing.assert_close(loaded.encode([item]), theirs(model, pixels_of(item), item.info["grid"]), rtol=1e-4, atol=1e-4)


def test_items_together_are_what_they_are_alone(pair: tuple[Any, Loaded]) -> None:
    _, loaded = pair
    items = [loaded.processor.process("image", picture(*size), LIMITS) for size in SIZES[:3]]
    items.insert(1, loaded.processor.process("video", film(3, 40, 24), {"min_pixels": 64, "max_pixels": 64 * 40}))
    together = loaded.encode(items)
    torch.testing.assert_close(together, torch.cat([loaded.encode([item]) for item in items]), rtol=1e-4, atol=1e-4)


def test_frames_are_patches_in_order(pair: tuple[Any, Loaded]) -> None:
    """A video whose frames need no resizing: patch for patch the frames' own pixels."""
    _, loaded = pair
    video = film(4, 24, 16)
    item = loaded.processor.process("video", video, {"min_pixels": 64, "max_pixels": 64 * 40})
    scale, mean, deviation = item.tensors["norm"][:, None, None, None, :].numpy()
    frames = ((video.frames.astype(np.float32) * scale - mean) / deviation).astype(np.float32)
    assert item.info["grid"] == (2, 4, 6)
    found = pixels_of(item).numpy().reshape(2, 2, 3, 2, 2, 3, 2, 4, 4)  # time, token, patch, channel, frame, pixel
    for time in range(2):
        for y in range(4):
            for x in range(6):
                for frame in range(2):
                    patch = found[time, y // 2, x // 2, y % 2, x % 2, :, frame]
                    want = frames[2 * time + frame, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4].transpose(2, 0, 1)
                    np.testing.assert_allclose(patch, want, atol=1e-6)


def test_the_largest_item_for_the_warm_up(pair: tuple[Any, Loaded]) -> None:
    _, loaded = pair
    for most in (1, 5, 12):
        item = loaded.processor.dummy(most)
        assert most - 2 <= item.num_embeddings <= most
        assert loaded.encode([item]).isfinite().all()
