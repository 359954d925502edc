"""The conformance suites on SmolVLM in full, and with media on Idefics3."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from modelrunner.media import Expanded, MediaItem
from modelrunner.testing import ByteTokenizerPlugin
from modelrunner.testing.conformance import MediaReference, ModelStateConformance, Reference, TakesMedia
from tests.model_states.idefics3.worlds import inputs_of_transformers, tags, write
from tests.model_states.media_worlds import SmallTokenizer


def load(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


class WithImages(TakesMedia):
    model_state = "idefics3"
    plugins = (ByteTokenizerPlugin(SmallTokenizer(tags)),)
    tokenizer = True
    picture_sizes = ((40, 40), (100, 61), (61, 100), (90, 20))
    kind: ClassVar[str]

    def checkpoint(self, folder: Path, seed: int) -> None:
        write(self.kind, folder, seed)

    def reference(self, folder: Path) -> Reference:
        whole = self.media_reference(folder)
        return lambda ids: whole(Expanded(list(ids), ()), ())

    def media_reference(self, folder: Path) -> MediaReference:
        model = load(folder)

        def logits(prompt: Expanded, items: Sequence[MediaItem]) -> torch.Tensor:
            with torch.no_grad():
                found: torch.Tensor = model(**inputs_of_transformers(prompt, items)).logits[0]
            return found

        return logits


class TestSmolVLM(WithImages, ModelStateConformance):
    kind = "smolvlm"
    media_options: ClassVar = {"longest_edge": 80}  # two tiles across


class TestIdefics3(WithImages):
    kind = "idefics3"
    media_options: ClassVar = {"longest_edge": 48}


del WithImages, ModelStateConformance, TakesMedia
