"""What images and videos become before the engine sees them: patches, tokens, positions. On the host, without weights.

Pixels stay bytes until they are on the device, and the frames of a still image are kept once: an eighth of what the tower takes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.media import IMAGE, VIDEO, Expanded, Int32Array, MediaItem, MediaProcessor, Video
from modelrunner.model_states.common.processing import IMAGE_FILE, MISSING_PILLOW, VIDEO_FILE, file_fields
from modelrunner.model_states.qwen_vl.config import QwenVLConfig
from modelrunner.model_states.qwen_vl.grids import Grid, bilinear_taps, by_token, num_tokens, patch_coordinates, token_positions, windows

if TYPE_CHECKING:
    from PIL import Image as PillowImage

    from modelrunner.text import Tokenizer

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # mean and deviation, of older checkpoints
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
OPTIONS = ("min_pixels", "max_pixels")
MAX_RATIO = 200  # of an image's sides
MARKS = {IMAGE: "<|vision_start|><|image_pad|><|vision_end|>", VIDEO: "<|vision_start|><|video_pad|><|vision_end|>"}


class QwenVLProcessor(MediaProcessor):
    """Images go through transformers' image processor with Pillow. Videos are resized by Pillow in the same way, frame by frame.

    Options of a request: `min_pixels` and `max_pixels`, of an image or of a frame (Qwen3-VL: of all frames of a video together), which
    keeps its proportions and is enlarged or reduced to lie between.
    """

    kinds = (IMAGE, VIDEO)

    def __init__(self, card: ModelCard, config: QwenVLConfig, tokenizer: Tokenizer | None, max_embeddings: int) -> None:
        """max_embeddings: of one item. Raises ImportError when Pillow is missing."""
        try:
            import PIL.Image  # noqa: F401
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        except ImportError as error:
            raise ImportError(MISSING_PILLOW.format(error)) from error
        super().__init__()
        self.config, self.vision, self.tokenizer, self.max_embeddings = config, config.vision, tokenizer, max_embeddings
        mean, deviation = HALF if config.stamped else CLIP
        given = {"image_mean": mean, "image_std": deviation, **file_fields(card, IMAGE_FILE)}
        sizes = {
            "patch_size": self.vision.patch_size,
            "temporal_patch_size": self.vision.temporal_patch_size,
            "merge_size": self.vision.merge,
        }
        self.images: Any = Qwen2VLImageProcessorPil(**{**given, **sizes})
        self.limits = {IMAGE: image_limits(card, config), VIDEO: video_limits(card, config)}
        self.norm = torch.tensor([[self.images.rescale_factor] * 3, self.images.image_mean, self.images.image_std], dtype=torch.float32)
        self.settings_key = json.dumps([sizes, self.limits, self.norm.tolist(), config.stamped], sort_keys=True).encode()

    def process(self, kind: str, value: PillowImage.Image | Video, options: Mapping[str, Any]) -> MediaItem:
        """See `MediaProcessor.process`; an item's `info` has its `grid` and the `interval` of its temporal patches in steps of time."""
        low, high = self.pixel_limits(kind, options)
        if isinstance(value, Video):
            return self.video(value, low, high)
        check_ratio(value.height, value.width)
        size = {"shortest_edge": low, "longest_edge": high}
        made = self.images.preprocess([value], size=size, do_rescale=False, do_normalize=False)
        grid = (1, int(made["image_grid_thw"][0][1]), int(made["image_grid_thw"][0][2]))
        count = self.check_size(kind, grid)
        shape = (-1, self.vision.in_channels, self.vision.temporal_patch_size, self.vision.patch_size**2)
        pixels = np.asarray(made["pixel_values"]).reshape(shape)[:, :, :1].astype(np.uint8)
        return self.item(kind, pixels, grid, 1.0, [self.config.image_token] * count)

    def video(self, video: Video, low: int, high: int) -> MediaItem:
        """A video's item. The last frame is repeated until the frames fill their temporal patches."""
        together, frames = self.vision.temporal_patch_size, video.frames
        if not len(frames):
            raise ValueError("the video has no frames")
        times = list(video.timestamps) + [video.timestamps[-1]] * (-len(frames) % together)
        height, width = self.frame_size(len(frames), frames.shape[1], frames.shape[2], low, high)
        grid = (len(times) // together, height // self.vision.patch_size, width // self.vision.patch_size)
        count = self.check_size(VIDEO, grid)
        resized = np.stack([resize(frame, height, width) for frame in frames])
        resized = np.concatenate((resized, np.repeat(resized[-1:], len(times) - len(frames), 0)))
        tokens = self.stamped_tokens(times, count // grid[0]) if self.config.stamped else [self.config.video_token] * count
        interval = self.vision.tokens_per_second * together / video.fps
        return self.item(VIDEO, self.patches(resized, grid), grid, 1.0 if self.config.stamped else interval, tokens)

    def stamped_tokens(self, times: Sequence[float], count: int) -> list[int]:
        """The ids of a video whose frames stand apart: before each temporal patch, the mean time of its first and last frame."""
        if self.tokenizer is None:
            raise ValueError(
                "a video of this model has the times of its frames in the prompt's text; that needs a tokenizer, and there is none"
            )
        tokens: list[int] = []
        together = self.vision.temporal_patch_size
        for first in range(0, len(times), together):
            seconds = (times[first] + times[first + together - 1]) / 2
            tokens += self.tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)
            tokens += [self.config.start_token, *[self.config.video_token] * count, self.config.end_token]
        return tokens

    def item(self, kind: str, pixels: npt.NDArray[np.uint8], grid: Grid, interval: float, tokens: list[int]) -> MediaItem:
        """pixels: [P, channels, frames, pixels of a patch], tokens in their own order; frames is 1 for a still image."""
        vision, ids = self.vision, np.array(tokens)
        coordinates = patch_coordinates(grid, vision.merge)
        arrays: dict[str, npt.NDArray[Any]] = {"frames": np.full(grid[0], grid[1] * grid[2], np.int32)}
        if vision.position_side:
            taps, arrays["weights"] = bilinear_taps(coordinates, grid, vision.position_side)
            arrays["taps"] = taps.astype(np.int32)
        info: dict[str, Any] = {"grid": grid, "interval": interval}
        if vision.window:
            cut = windows(grid, vision.merge, vision.window)
            pixels, coordinates = by_token(pixels, cut.order, vision.merge), by_token(coordinates, cut.order, vision.merge)
            arrays |= {"order": cut.order, "windows": cut.lengths * vision.merge**2}
            info["windows"] = arrays["windows"].tolist()
        arrays |= {"pixels": pixels, "coordinates": coordinates.astype(np.int32)}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        embedded = np.isin(ids, (self.config.image_token, self.config.video_token))
        return MediaItem(kind, tuple(tokens), embedded, {**tensors, "norm": self.norm}, info)

    def patches(self, frames: npt.NDArray[np.uint8], grid: Grid) -> npt.NDArray[np.uint8]:
        """[F, height, width, channels] -> [P, channels, frames of a patch, pixels of a patch]"""
        merge, patch, together = self.vision.merge, self.vision.patch_size, self.vision.temporal_patch_size
        cut = frames.reshape(grid[0], together, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, -1)
        ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)  # time, token's row and column, patch's, channel, frame, pixel's
        return ordered.reshape(-1, ordered.shape[5], together, patch * patch)

    def placeholder(self, kind: str) -> tuple[int, ...]:
        """One token; for a video whose frames stand apart, its marks go too."""
        if kind == VIDEO and self.config.stamped:
            return (self.config.start_token, self.config.video_token, self.config.end_token)
        return (self.config.image_token if kind == IMAGE else self.config.video_token,)

    def placeholder_text(self, kind: str) -> str:
        return MARKS[kind]

    def dummy(self, max_embeddings: int) -> MediaItem:
        most, merge = min(max_embeddings, self.max_embeddings), self.vision.merge
        down = math.isqrt(most)
        grid = (1, down * merge, most // down * merge)
        pixels = np.zeros((grid[1] * grid[2], self.vision.in_channels, 1, self.vision.patch_size**2), np.uint8)
        return self.item(IMAGE, pixels, grid, 1.0, [self.config.image_token] * num_tokens(grid, merge))

    def positions(self, prompt: Expanded, items: Sequence[MediaItem]) -> Int32Array:
        """Time, height and width of each token (M-RoPE, arXiv:2409.12191, section 2.1): text counts on from the largest position so far,
        and an image or video spreads from there in its own directions."""
        places = np.empty((3, len(prompt.token_ids)), np.int32)
        at = following = 0
        for run in prompt.runs:
            places[:, at : run.start] = np.arange(run.start - at) + following
            following += run.start - at
            at = run.start + run.length
            info = items[run.item].info
            frames, height, width = info["grid"]
            if self.config.stamped:
                frames = 1
            places[:, run.start : at] = token_positions((frames, height, width), self.vision.merge, info["interval"]).T + following
            following = int(places[:, run.start : at].max()) + 1
        places[:, at:] = np.arange(places.shape[1] - at) + following
        if places.size and places.max() >= places.shape[1]:
            raise ValueError(
                f"the prompt has {places.shape[1]} tokens and would reach position {places.max()}: frames of a video are too far apart for "
                "their size. Give fewer seconds a frame, or larger frames"
            )
        return places

    def pixel_limits(self, kind: str, options: Mapping[str, Any]) -> tuple[int, int]:
        """Fewest and most pixels. Raises ValueError that names a bad option."""
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise ValueError(f"mm_processor_kwargs has {', '.join(unknown)}; Qwen-VL models take {', '.join(OPTIONS)}")
        limits = [options.get(name, default) for name, default in zip(OPTIONS, self.limits[kind], strict=True)]
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in limits) or limits[0] > limits[1]:
            raise ValueError(
                f"min_pixels is {limits[0]!r}, max_pixels {limits[1]!r}; whole numbers above 0 are needed, the first no larger"
            )
        return limits[0], limits[1]

    def check_size(self, kind: str, grid: Grid) -> int:
        """The tokens of an item. Raises ValueError when they are too many."""
        count = num_tokens(grid, self.vision.merge)
        if count > self.max_embeddings:
            raise ValueError(f"the {kind} takes {count} tokens; {self.max_embeddings} are the most. A smaller max_pixels makes them fewer")
        return count

    def frame_size(self, frames: int, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        """What a video's frames are resized to: multiples of a token's side. The limits hold for a frame, or for all of them (Qwen3-VL)."""
        check_ratio(height, width)
        side, together = self.vision.patch_size * self.vision.merge, self.vision.temporal_patch_size
        if not self.config.stamped:
            return fitted(height, width, side, low, high)
        if min(height, width) < side:
            grown = max(side / height, side / width)
            height, width = int(height * grown), int(width * grown)
        counted = round(frames / together) * together
        return fitted(height, width, side, low, high, frames=frames, counted=counted)


def fitted(height: int, width: int, side: int, low: int, high: int, *, frames: int = 1, counted: int = 1) -> tuple[int, int]:
    """Height and width as multiples of `side`, rounded, and so that `counted` frames of them have between `low` and `high` pixels.

    frames: by which they are reduced or enlarged; it differs from `counted` where the last temporal patch is not full.
    """
    rows, columns = round(height / side) * side, round(width / side) * side
    if counted * rows * columns > high:
        shrunk = math.sqrt(frames * height * width / high)
        return max(side, math.floor(height / shrunk / side) * side), max(side, math.floor(width / shrunk / side) * side)
    if counted * rows * columns < low:
        grown = math.sqrt(low / (frames * height * width))
        return math.ceil(height * grown / side) * side, math.ceil(width * grown / side) * side
    return rows, columns


def check_ratio(height: int, width: int) -> None:
    """Raises ValueError for a stripe that the model was never shown."""
    if min(height, width) < 1 or max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"{width} x {height} pixels: neither side may be more than {MAX_RATIO} times the other")


def resize(frame: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """[h, w, 3] -> [height, width, 3], bicubic."""
    from PIL import Image

    if frame.shape[:2] == (height, width):
        return frame
    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))


def image_limits(card: ModelCard, config: QwenVLConfig) -> tuple[int, int]:
    """Fewest and most pixels of an image, as the checkpoint's file says; else 4 and 16,384 tokens, as the published ones have them."""
    return pixel_fields(file_fields(card, IMAGE_FILE), config, 4, 16384)


def video_limits(card: ModelCard, config: QwenVLConfig) -> tuple[int, int]:
    """The same of a frame (128 and 768 tokens), or of all frames together (Qwen3-VL)."""
    return pixel_fields(file_fields(card, VIDEO_FILE), config, *((4, 24576) if config.stamped else (128, 768)))


def pixel_fields(fields: Mapping[str, Any], config: QwenVLConfig, fewest: int, most: int) -> tuple[int, int]:
    """`min_pixels` and `max_pixels`, in either spelling; the defaults in tokens."""
    size, token = fields.get("size") or {}, (config.vision.patch_size * config.vision.merge) ** 2
    low = fields.get("min_pixels") or size.get("shortest_edge") or fewest * token
    high = fields.get("max_pixels") or size.get("longest_edge") or most * token
    return int(low), int(high)
