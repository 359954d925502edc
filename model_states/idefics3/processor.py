"""What images become before the engine sees them: tiles, and the tokens that tell where each lies. On the host, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.media import IMAGE, MediaItem, MediaProcessor, Video
from modelrunner.model_states.common.processing import IMAGE_FILE, MISSING_PILLOW, file_fields
from modelrunner.model_states.idefics3.config import Idefics3Config

if TYPE_CHECKING:
    from PIL import Image as PillowImage

    from modelrunner.text import Tokenizer

AROUND, WHOLE, PIXELS = "<fake_token_around_image>", "<global-img>", "<image>"
OPTIONS = ("do_image_splitting", "longest_edge")
MAX_RATIO = 200  # of an image's sides


class Idefics3Processor(MediaProcessor):
    """Images go through transformers' image processor with Pillow: resized, cut into square tiles, and small as a whole once more.

    Options of a request: `longest_edge`, pixels that the longer side is resized to, and `do_image_splitting`, false for the whole alone.
    """

    kinds: ClassVar[tuple[str, ...]] = (IMAGE,)

    def __init__(self, card: ModelCard, config: Idefics3Config, tokenizer: Tokenizer | None, max_embeddings: int) -> None:
        """max_embeddings: of one item. Raises ImportError when Pillow is missing."""
        try:
            import PIL.Image  # noqa: F401
            from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
            from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
        except ImportError as error:
            raise ImportError(MISSING_PILLOW.format(error)) from error
        super().__init__()
        self.config, self.vision, self.tokenizer, self.max_embeddings = config, config.vision, tokenizer, max_embeddings
        kind = SmolVLMImageProcessorPil if config.smol else Idefics3ImageProcessorPil
        fields = {**file_fields(card, IMAGE_FILE), "max_image_size": {"longest_edge": self.vision.side}}
        self.images: Any = kind(**{**fields, "size": {"longest_edge": config.longest_edge}})
        self.norm = torch.tensor([[self.images.rescale_factor] * 3, self.images.image_mean, self.images.image_std], dtype=torch.float32)
        sizes = [self.vision.side, self.vision.patch_size, self.vision.shuffle, config.longest_edge, config.smol]
        self.settings_key = json.dumps([sizes, self.images.do_image_splitting, self.norm.tolist()]).encode()

    def process(self, kind: str, value: PillowImage.Image | Video, options: Mapping[str, Any]) -> MediaItem:
        """See `MediaProcessor.process`; an item's `info` has its number of `tiles`."""
        if isinstance(value, Video):
            raise ValueError("Idefics3 and SmolVLM models are run with images alone, not with videos")
        longest, splitting = self.options(options)
        if min(value.size) < 1 or max(value.size) > MAX_RATIO * min(value.size):
            raise ValueError(f"{value.width} x {value.height} pixels: neither side may be more than {MAX_RATIO} times the other")
        made = self.images.preprocess(
            [[value]],
            size={"longest_edge": longest},
            do_image_splitting=splitting,
            do_rescale=False,
            do_normalize=False,
            return_row_col_info=True,
        )
        tiles = np.asarray(made["pixel_values"])[0].astype(np.uint8)
        return self.item(tiles, self.tokens(int(made["rows"][0][0]), int(made["cols"][0][0])))

    def item(self, tiles: npt.NDArray[np.uint8], tokens: list[int]) -> MediaItem:
        """tiles: [N, channels, side, side]."""
        embedded = np.array(tokens) == self.config.image_token
        count, wanted = int(embedded.sum()), len(tiles) * self.vision.tokens
        if count != wanted:
            raise ValueError(f"the tokenizer makes {count} image tokens ({self.config.image_token}) where {wanted} were written")
        if count > self.max_embeddings:
            raise ValueError(f"the image takes {count} tokens; {self.max_embeddings} are the most. A smaller longest_edge makes them fewer")
        across, patch = self.vision.patches_across, self.vision.patch_size
        patches = tiles.reshape(len(tiles), -1, across, patch, across, patch).transpose(0, 2, 4, 1, 3, 5)
        pixels = torch.from_numpy(np.ascontiguousarray(patches.reshape(len(tiles) * across**2, tiles.shape[1], patch**2)))
        lengths = torch.full((len(tiles),), across**2, dtype=torch.int32)
        return MediaItem(IMAGE, tuple(tokens), embedded, {"pixels": pixels, "lengths": lengths, "norm": self.norm}, {"tiles": len(tiles)})

    def tokens(self, rows: int, columns: int) -> list[int]:
        """The ids of an image of rows x columns tiles and the whole, or of the whole alone (0 x 0)."""
        if self.tokenizer is None:
            raise ValueError("an image of this model has text between its tiles in the prompt; that needs a tokenizer, and there is none")
        tile, text = PIXELS * self.vision.tokens, ""
        for row in range(1, rows + 1):
            text += "".join(f"{AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        text += ("\n" if rows else "") + f"{AROUND}{WHOLE}{tile}{AROUND}"
        return self.tokenizer.encode(text, add_special_tokens=False)

    def placeholder(self, kind: str) -> tuple[int, ...]:
        return (self.config.image_token,)

    def placeholder_text(self, kind: str) -> str:
        return PIXELS

    def dummy(self, max_embeddings: int) -> MediaItem:
        count = max(1, min(max_embeddings, self.max_embeddings) // self.vision.tokens)
        tiles = np.zeros((count, self.vision.channels, self.vision.side, self.vision.side), np.uint8)
        return self.item(tiles, [self.config.image_token] * (count * self.vision.tokens))

    def options(self, options: Mapping[str, Any]) -> tuple[int, bool]:
        """`longest_edge` and `do_image_splitting`. Raises ValueError that names a bad option."""
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise ValueError(f"mm_processor_kwargs has {', '.join(unknown)}; Idefics3 and SmolVLM models take {', '.join(OPTIONS)}")
        longest = options.get("longest_edge", self.config.longest_edge)
        splitting = options.get("do_image_splitting", self.images.do_image_splitting)
        if not isinstance(longest, int) or isinstance(longest, bool) or not 1 <= longest <= self.config.longest_edge:
            raise ValueError(f"longest_edge is {longest!r}; a whole number from 1 to {self.config.longest_edge} is needed")
        if not isinstance(splitting, bool):
            raise ValueError(f"do_image_splitting is {splitting!r}; true or false is needed")
        return longest, splitting
