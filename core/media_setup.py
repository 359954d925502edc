"""What an engine needs for media, put together at start-up: the front for its requests, the arena, the encoder and its books."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelrunner.encoder import Encoder
from modelrunner.encoder_arena import EncoderArena
from modelrunner.encoder_graphs import EncoderGraphs
from modelrunner.encoding import Encoding
from modelrunner.errors import PluginError
from modelrunner.media import MediaItem, MediaProcessor
from modelrunner.media_front import MediaFacts, MediaFront
from modelrunner.model_state import No, answer_of
from modelrunner.no_media import NoMedia

if TYPE_CHECKING:
    import torch

    from modelrunner.device import Device
    from modelrunner.model_state import ModelState, Needs
    from modelrunner.settings import RunnerSettings
    from modelrunner.text import Tokenizer

FIRST_EMBEDDINGS = 256  # of the item that the start-up encodes where memory is not measured
SMALL = (4, 16, 64)  # embeddings of items that it encodes too


@dataclass(frozen=True)
class MediaParts:
    """front: makes media of requests ready. encoder: None where there are none. books: of the scheduler. largest: embeddings of the largest
    item that can be encoded."""

    front: MediaFront
    encoder: Encoder | None
    books: NoMedia
    largest: int = 0

    @property
    def arena(self) -> torch.Tensor | None:
        return None if self.encoder is None else self.encoder.arena

    @property
    def encodes(self) -> bool:
        """Whether the model has an encoder, which start-up tries out."""
        return self.encoder is not None and not self.front.facts.problem

    def try_out(self, most: int | None = None) -> None:
        """Encode an item of the processor's, with `most` embeddings at most, or as large as can be; small ones, of which products may have
        kernels of their own; the largest that are captured; and where encoding may be kept to a part of the device, the largest there."""
        assert self.encoder is not None
        encoder, size = self.encoder, self.largest if most is None else min(most, self.largest)
        item = self.front.processor.dummy(size)
        self._check(item, size)
        encoder.try_out(item)
        # Embeddings, how often, on a part of the device.
        tries = [*((tokens, 1, False) for tokens in SMALL), (encoder.graph_tokens, 2, False)]
        if encoder.shares:
            tries += [(encoder.narrow, 1, True), (encoder.graph_tokens, 2, True)]
        for tokens, times, shared in tries:
            item = self.front.processor.dummy(min(size, tokens)) if tokens else item
            if item.num_embeddings <= tokens:  # else none is as small as that
                encoder.try_out(item, times, shared)

    def _check(self, item: object, size: int) -> None:
        """Raise PluginError for a dummy that is no item, or too large."""
        if not isinstance(item, MediaItem) or not 0 < item.num_embeddings <= size:
            gave = f"an item of {item.num_embeddings} embeddings" if isinstance(item, MediaItem) else f"a {type(item).__name__}"
            raise PluginError(
                f"{type(self.front.processor).__name__}.dummy({size}) gave {gave}; a MediaItem of 1 to {size} is needed. If that is the "
                "model's smallest item, raise media.arena_tokens or model.max_model_len"
            )


def media_facts(state: ModelState, needs: Needs, settings: RunnerSettings, dtype: str) -> MediaFacts:
    """What requests may bring, and why not. Raises PluginError where the settings turn on what the state cannot do."""
    name, problem = type(state).__name__, ""
    if needs.media is None:
        problem = f"the model takes text only: its ModelState, {name}, declares no media"
    elif isinstance(answer := answer_of(state, "multimodal"), No):
        problem = f"{name} takes no media: {answer.reason}"
    embeds = "" if settings.media.prompt_embeds else "embeddings as prompts are off; set media.prompt_embeds=true"
    if not embeds and isinstance(answer := answer_of(state, "prompt_embeds"), No):
        raise PluginError(f"media.prompt_embeds is set, but {name} cannot do that: {answer.reason}")
    return MediaFacts(problem, embeds, needs.hidden_size, dtype, 1 if needs.media is None else needs.media.position_rows)


def open_media(
    state: ModelState,
    needs: Needs,
    settings: RunnerSettings,
    device: Device,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    shifted: bool = False,
) -> MediaParts:
    """Put it together; the arena is allocated here. needs, max_model_len: of the target model. shifted: see `Encoding`."""
    facts = media_facts(state, needs, settings, str(dtype).removeprefix("torch."))
    front = MediaFront(settings.media, facts, lambda: state.media_processor(tokenizer))
    if facts.problem and facts.prompt_embeds_problem:
        return MediaParts(front, None, NoMedia())
    most = min(needs.media.max_embeddings, max_model_len) if needs.media is not None and not facts.problem else 0
    lines = settings.media.arena_tokens
    if lines is None:
        lines = max(most, min(settings.scheduler.max_batched_tokens, max_model_len))
    width = needs.hidden_size if needs.media is None else needs.media.width(needs.hidden_size)
    together = 1 if settings.device.deterministic else settings.media.encoder_tokens  # a product depends on how many lines it has
    graphs = None
    if needs.media is not None and needs.media.capture and device.captures and not settings.graphs.eager and settings.media.graph_tokens:
        graphs = EncoderGraphs(device, state, width, dtype, min(settings.media.graph_tokens, lines))
    encoder = Encoder(device, state, lines, width, needs.hidden_size, dtype, settings.media.encoder_tokens, graphs)
    books = Encoding(
        EncoderArena(lines),
        encoder.start,
        max_together=together,
        chunked=settings.scheduler.chunked_prefill,
        position_rows=facts.position_rows,
        shifted=shifted,
        share=settings.media.encoder_share,
        pace=device.pace_side if device.paces else None,
    )
    return MediaParts(front, encoder, books, min(most, lines))


def front_of(settings: RunnerSettings, facts: MediaFacts, make_state: Callable[[], ModelState], tokenizer: Tokenizer | None) -> MediaFront:
    """The front of a process that has no engine. make_state: makes the model's state, of which nothing is declared or built."""

    def processor() -> MediaProcessor:
        return make_state().media_processor(tokenizer)

    return MediaFront(settings.media, facts, processor)
