"""The conformance suites on both generations, with text and with media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from modelrunner.media import Expanded, MediaItem
from modelrunner.testing import ByteTokenizerPlugin
from modelrunner.testing.conformance import MediaReference, ModelStateConformance, Reference, TakesMedia
from tests.model_states.media_worlds import SmallTokenizer, make_model
from tests.model_states.qwen_vl.worlds import LIMITS, NEWER, OLDER, digits, inputs_of_transformers


class QwenVL(ModelStateConformance, TakesMedia):
    model_state = "qwen_vl"
    plugins = (ByteTokenizerPlugin(SmallTokenizer(digits)),)
    tokenizer = True
    media_options: ClassVar = LIMITS
    config: ClassVar[Mapping[str, Any]]

    def checkpoint(self, folder: Path, seed: int) -> None:
        make_model(self.config, seed).save_pretrained(folder)

    def reference(self, folder: Path) -> Reference:
        model = load(folder)

        def logits(ids: Sequence[int]) -> torch.Tensor:
            with torch.no_grad():
                found: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0]
            return found

        return logits

    def media_reference(self, folder: Path) -> MediaReference:
        model = load(folder)

        def logits(prompt: Expanded, items: Sequence[MediaItem]) -> torch.Tensor:
            with torch.no_grad():
                found: torch.Tensor = model(**inputs_of_transformers(prompt, items)).logits[0]
            return found

        return logits


def load(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


class TestQwen25VL(QwenVL):
    config = OLDER


class TestQwen3VL(QwenVL):
    config = NEWER


del QwenVL, ModelStateConformance, TakesMedia
