"""The conformance suite of a ModelState that takes images and videos. Needs Pillow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch

from modelrunner.encoding import Encoding
from modelrunner.media import IMAGE, VIDEO, EncoderInput, Expanded, MediaItem, MediaProcessor, Video
from modelrunner.testing.conformance.case import StateCase
from modelrunner.testing.conformance.lab import NEAR_TIE, Plain
from modelrunner.testing.conformance.promises import LOWER_PRECISION_ERROR
from modelrunner.testing.conformance.trace import StepTrace
from modelrunner.testing.conformance.values import forbid_values
from modelrunner.testing.drive import Driver
from modelrunner.testing.probe import EngineProbe

if TYPE_CHECKING:
    from modelrunner.engine import Engine

MediaReference = Callable[[Expanded, Sequence[MediaItem]], torch.Tensor]
"""A prompt with its items in their places, and the items -> logits [length, vocabulary], as `Reference`."""

FRAMES_A_SECOND = 2.0


def picture(width: int, height: int, seed: int = 0) -> Any:
    """A smooth random RGB picture, as Pillow has it."""
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (max(2, height // 6), max(2, width // 6), 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def film(frames: int, width: int, height: int, fps: float = FRAMES_A_SECOND, seed: int = 0) -> Video:
    """A random video whose frames differ."""
    shots = np.stack([np.asarray(picture(width, height, 100 * seed + n)) for n in range(frames)])
    return Video(shots, fps, tuple(n / fps for n in range(frames)))


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt of the suite: as the engine takes it, and as the reference does. runs: (first token, token after the last) of its media."""

    request: Mapping[str, Any]
    expanded: Expanded
    items: tuple[MediaItem, ...]

    @property
    def runs(self) -> list[tuple[int, int]]:
        return [(run.start, run.start + run.length) for run in self.expanded.runs]

    def __len__(self) -> int:
        return len(self.expanded.token_ids)


class MediaLab:
    """What the tests with media of one class share: prompts, the reference, plain results. Made once per class."""

    def __init__(self, case: TakesMedia) -> None:
        self.case, self.lab = case, case.lab
        self.plain = cache(self._plain)

    @cached_property
    def engine(self) -> Engine:
        """One that runs nothing: for its processor and its state."""
        return self.lab.engine(depth=1, rows=1, prefix=False, chunked=False)

    @property
    def processor(self) -> MediaProcessor:
        return self.engine.assembly.media.front.processor

    @cached_property
    def reference(self) -> MediaReference:
        return self.case.media_reference(self.lab.checkpoint(0))

    def prompt(self, parts: Sequence[int | tuple[str, Any]]) -> MediaPrompt:
        """parts: how many tokens of text, or (kind, picture or `Video`)."""
        ids, text, options = list[int](), list(self.case.text_ids), self.case.media_options
        data: dict[str, list[Any]] = {}
        items: dict[str, list[MediaItem]] = {}
        for number, part in enumerate(parts):
            if isinstance(part, int):
                ids += [text[(number + 2 * i) % len(text)] for i in range(part)]
                continue
            kind, value = part
            ids += self.processor.placeholder(kind)
            given = (value.frames, {"fps": value.fps, "timestamps": value.timestamps}) if isinstance(value, Video) else value
            data.setdefault(kind, []).append(given)
            items.setdefault(kind, []).append(self.processor.process(kind, value, options))
        made = [item for many in items.values() for item in many]
        media = {"multi_modal_data": data, "mm_processor_kwargs": options} if made else {}
        expanded = self.processor.expand(ids, made) if made else Expanded(ids, ())
        return MediaPrompt({"prompt_token_ids": ids, **media}, expanded, tuple(made))

    @cached_property
    def prompts(self) -> tuple[MediaPrompt, ...]:
        """Two images in text; three images, of which the first stands at the start; text alone; an image again beside another; a video."""
        first, second, third, fourth = (picture(*size, seed=seed) for seed, size in enumerate(self.case.picture_sizes))
        made: list[Sequence[int | tuple[str, Any]]] = [
            (5, (IMAGE, first), 6, (IMAGE, second), 7),
            ((IMAGE, third), 3, (IMAGE, first), 1, (IMAGE, fourth), 2),
            (19,),
            (5, (IMAGE, first), 6, (IMAGE, picture(*self.case.picture_sizes[1], seed=50)), 7),
        ]
        if VIDEO in self.processor.kinds:
            width, height, frames = self.case.video_size
            made.append((4, (VIDEO, film(frames, width, height)), 3, (IMAGE, second), 2))
        return tuple(self.prompt(parts) for parts in made)

    @property
    def num_different(self) -> int:
        """Pictures and videos in the prompts, each counted once."""
        return 5 + (VIDEO in self.processor.kinds)

    @property
    def items(self) -> list[MediaItem]:
        return [item for prompt in self.prompts for item in prompt.items]

    def logits(self, prompt: MediaPrompt, output: Sequence[int]) -> torch.Tensor:
        """The reference's logits of a prompt and what follows it."""
        return self.reference(replace(prompt.expanded, token_ids=[*prompt.expanded.token_ids, *output]), prompt.items).float()

    def _plain(self, number: int) -> Plain:
        """What prompt `number` gives alone, whole, one step deep."""
        engine, prompt = self.lab.engine(depth=1, rows=1, prefix=False, chunked=False), self.prompts[number]
        trace = StepTrace(engine)
        (tokens,) = self.lab.run(engine, [prompt.request])
        best = torch.stack([trace.logits["0"][len(prompt) - 1 + i] for i in range(len(tokens))]).topk(2).values
        return Plain(tuple(tokens), tuple((best[:, 0] - best[:, 1]).tolist()))

    def run(self, engine: Engine, probe: Callable[[Driver, EngineProbe], None] | None = None) -> list[list[int]]:
        """Outputs of all prompts, submitted at once."""
        return self.lab.run(engine, [prompt.request for prompt in self.prompts], probe)

    def encoded(self, items: Sequence[MediaItem]) -> torch.Tensor:
        """Lines of the arena of some items, encoded together: [embeddings, width] float32."""
        parts = self.engine.assembly
        assert parts.needs.media is not None
        out = torch.full((sum(item.num_embeddings for item in items), parts.needs.media.width(parts.needs.hidden_size)), torch.nan)
        given = [EncoderInput(item.kind, item.num_embeddings, item.tensors, item.info) for item in items]
        with torch.inference_mode():
            parts.state.encode(given, out)
        return out

    def assert_plain(self, outputs: Sequence[Sequence[int]]) -> None:
        """Each output equals the plain one, up to the first near-tie."""
        for number, output in enumerate(outputs):
            want = self.plain(number)
            assert len(output) == len(want.tokens)
            differ = [i for i, (a, b) in enumerate(zip(output, want.tokens, strict=True)) if a != b]
            assert not differ or want.margins[differ[0]] < NEAR_TIE, (
                f"output token {differ[0]} of media prompt {number} is {output[differ[0]]}; alone, whole and one step deep it is "
                f"{want.tokens[differ[0]]}, whose logit leads by {want.margins[differ[0]]:.2g}:\n"
                f" got {list(output)}\nwant {list(want.tokens)}"
            )


class TakesMedia(StateCase):
    """Tests with images and videos, for a state that declares `Needs.media`. Subclass it beside `ModelStateConformance`:

        class TestMyModel(ModelStateConformance, TakesMedia):
            ...
            def media_reference(self, folder): ...   # -> a callable: (Expanded, items) -> logits [length, vocabulary]

    picture_sizes: width and height of four pictures, of awkward sizes. video_size: width, height and frames of a video. media_options: the
    requests' `mm_processor_kwargs`, best such that a picture takes a dozen tokens. text_ids: ids of text that stand for no item.
    """

    picture_sizes: ClassVar[Sequence[tuple[int, int]]] = ((33, 70), (57, 40), (8, 8), (90, 31))
    video_size: ClassVar[tuple[int, int, int]] = (40, 24, 3)
    media_options: ClassVar[Mapping[str, Any]] = {}
    text_ids: ClassVar[Sequence[int]] = (5, 17, 40, 23, 60, 31, 9)

    def media_reference(self, folder: Path) -> MediaReference:
        raise NotImplementedError(f"{type(self).__name__} must define media_reference(folder) -> (Expanded, items) -> logits")

    @property
    def media(self) -> MediaLab:
        """Shared by the tests of one class."""
        cls = type(self)
        if "_media" not in vars(cls):
            cls._media = MediaLab(self)  # type: ignore[attr-defined]
        media: MediaLab = vars(cls)["_media"]
        return media

    # ---- equal to the reference --------------------------------------------------------------------------------------

    def assert_media_logits(self, trace: StepTrace, outputs: Sequence[Sequence[int]]) -> None:
        for number, (prompt, output) in enumerate(zip(self.media.prompts, outputs, strict=True)):
            want, got = self.media.logits(prompt, output), trace.logits[str(number)]
            places = sorted(got)
            assert places[-1] == len(prompt) + len(output) - 2
            assert want.std() > 0.1, f"the reference's logits of media prompt {number} are too flat to prove anything"
            found = torch.stack([got[place] for place in places])
            where = partial("logits of media prompt {} (media at {}): {}".format, number, prompt.runs)
            torch.testing.assert_close(found, want[places], rtol=self.tolerance, atol=self.tolerance, msg=where)

    def test_media_logits_equal_the_reference(self) -> None:
        """At every position, prompts with media and without in one batch."""
        engine = self.lab.engine(depth=1, prefix=False, rows=8)
        trace = StepTrace(engine)
        self.assert_media_logits(trace, self.media.run(engine))

    def test_media_logits_in_chunks_equal_the_reference(self) -> None:
        """Chunks whose edges lie inside of images."""
        if not self.lab.works("chunked_prefill"):
            pytest.skip("the state refuses chunked_prefill")
        edges = {start + 7 for prompt in self.media.prompts for start, _ in prompt.runs}
        assert edges, "no prompt has media"
        engine = self.lab.engine(depth=1, prefix=False, tokens=7, rows=2)
        trace = StepTrace(engine)
        self.assert_media_logits(trace, self.media.run(engine))

    @pytest.mark.parametrize("setting", [{"model.dtype": "bfloat16"}, {"linear.scheme": "int8"}], ids=["bfloat16", "int8"])
    def test_media_in_few_bits(self, setting: Mapping[str, Any]) -> None:
        """In bfloat16, and with int8 weights in decoder and encoder, logits are near the reference's float32 ones."""
        engine = self.lab.engine(setting, depth=1, prefix=False, rows=8)
        trace = StepTrace(engine)
        self.media.run(engine)
        for number, prompt in enumerate(self.media.prompts):
            want = self.media.logits(prompt, ())
            got = torch.stack([trace.logits[str(number)][place] for place in range(len(prompt))])
            error = float((got - want).norm() / want.norm())
            assert error < LOWER_PRECISION_ERROR, f"logits of media prompt {number} are {error:.3f} of their norm away from the reference's"

    def test_media_greedy_tokens_equal_the_reference(self) -> None:
        """If each output token is the reference's best one after those before it, the reference decodes to the same tokens."""
        outputs, compared = self.media.run(self.lab.engine(device="deferred_cpu", tokens=self.small_step)), 0
        for prompt, output in zip(self.media.prompts, outputs, strict=True):
            best = self.media.logits(prompt, output)[len(prompt) - 1 : -1].topk(2)
            for place, token in enumerate(output):
                if best.values[place, 0] - best.values[place, 1] < NEAR_TIE:
                    break
                assert token == best.indices[place, 0], f"output token {place} is {token}; the reference has {best.indices[place].tolist()}"
                compared += 1
        assert compared >= 0.8 * len(outputs) * self.max_tokens

    def test_another_picture_gives_another_answer(self) -> None:
        """Prompts 0 and 3 differ in the second picture alone."""
        first, other = (self.media.logits(self.media.prompts[number], ())[-1] for number in (0, 3))
        assert (first - other).abs().max() > 10 * self.tolerance, "the reference does not look at the second picture"

    # ---- equal to itself ---------------------------------------------------------------------------------------------

    def test_media_depth_and_batch(self) -> None:
        for depth, seed, rows in ((1, 0, 8), (2, 0, 2), (2, 1, 8), (3, 2, 4)):
            engine = self.lab.engine(depth=depth, device="deferred_cpu", device_seed=seed, rows=rows, tokens=self.small_step)
            self.media.assert_plain(self.media.run(engine))

    def test_media_chunks(self) -> None:
        if not self.lab.works("chunked_prefill"):
            pytest.skip("the state refuses chunked_prefill")
        for tokens in (5, 8, 16):
            self.media.assert_plain(self.media.run(self.lab.engine(tokens=tokens, device="deferred_cpu")))

    def test_media_prefix_cache(self) -> None:
        """Pages of a picture are found again, and never for another picture of the same size."""
        if not self.lab.works("prefix_cache"):
            pytest.skip("the state refuses prefix_cache")
        engine = self.lab.engine(device="deferred_cpu", tokens=self.small_step)
        probe = EngineProbe(Driver(engine))
        probe.poison_freed_pages()
        self.media.assert_plain(self.media.run(engine))
        before = probe.counters().cached_tokens
        self.media.assert_plain(self.media.run(engine))
        assert probe.counters().cached_tokens > before, "no prompt found its pages again, though all had run before"
        probe.assert_clean()

        engine = self.lab.engine(depth=1, rows=1)
        driver = Driver(engine)
        self.lab.run(engine, [self.media.prompts[0].request])
        before = engine.scheduler.stats.cached_tokens
        self.lab.run(engine, [self.media.prompts[3].request])
        found, alike = engine.scheduler.stats.cached_tokens - before, self.media.prompts[0].runs[-1][0]
        assert 0 < found <= alike, f"{found} tokens were found again; up to the other picture there are {alike}"
        assert not driver.engine.has_unfinished()

    @pytest.mark.parametrize("prefix", [False, True])
    def test_media_preempted_and_resumed(self, prefix: bool) -> None:
        if prefix and not self.lab.works("prefix_cache"):
            pytest.skip("the state refuses prefix_cache")
        engine = self.lab.engine(device="deferred_cpu", tokens=self.small_step, prefix=prefix)

        def disturb(driver: Driver, probe: EngineProbe) -> None:
            if driver.steps == 0:
                probe.poison_freed_pages()
            if driver.steps % 4 == 3 and driver.steps < 40:
                probe.drain()
                running = [name for name in engine.requests if probe.row_of(name) >= 0]
                if running:
                    probe.preempt(running[driver.steps % len(running)])

        self.media.assert_plain(self.media.run(engine, disturb))
        assert engine.scheduler.stats.preemptions >= 3

    def test_media_graphs_change_nothing(self) -> None:
        engine = self.lab.engine(tokens=self.small_step, device="deferred_cpu", captures=True)
        if (reason := engine.runner.graphs.reason) and engine.assembly.needs.capture == "none":
            pytest.skip(f"declared: {reason}")
        self.media.assert_plain(self.media.run(engine))

    def test_media_with_drafts(self) -> None:
        """Drafts of the n-gram drafter, which tells of nothing but ids, change nothing: neither those accepted nor those refused."""
        if not self.lab.works("speculation"):
            pytest.skip("the state refuses speculation")
        for tokens in (self.small_step, 64):
            engine = self.lab.engine({"speculation.drafter": "ngram"}, device="deferred_cpu", tokens=tokens)
            self.media.assert_plain(self.media.run(engine))
            stats = engine.scheduler.stats
            assert 0 < sum(stats.accepted_at) < sum(stats.drafted_at), "drafts of both kinds are needed: change text_ids"

    def test_media_in_an_arena_for_one_item(self) -> None:
        """Requests wait for each other's items, and none for ever."""
        largest = max(item.num_embeddings for prompt in self.media.prompts for item in prompt.items)
        engine = self.lab.engine({"media.arena_tokens": largest}, device="deferred_cpu", tokens=self.small_step)
        self.media.assert_plain(self.media.run(engine))

    # ---- encode ------------------------------------------------------------------------------------------------------

    def test_items_together_are_what_they_are_alone(self) -> None:
        items = self.media.items
        alone = torch.cat([self.media.encoded([item]) for item in items])
        assert alone.isfinite().all(), "encode left lines unwritten, or gave something that is not finite"
        torch.testing.assert_close(self.media.encoded(items), alone, rtol=self.tolerance, atol=self.tolerance)

    def test_an_item_is_encoded_once(self) -> None:
        """Requests with the same pictures, and the same requests again, find what is there."""
        engine = self.lab.engine({"media.arena_tokens": 4096}, prefix=False)
        for _ in range(2):
            self.media.run(engine)
        assert isinstance(engine.media, Encoding)
        assert engine.media.num_encoded == self.media.num_different

    def test_steps_and_encodings_ask_for_no_values(self) -> None:
        """What a GPU could not do without making the host wait is refused, here on the CPU."""
        engine = self.lab.engine(depth=1, tokens=self.small_step)
        forbid_values(engine)
        self.media.assert_plain(self.media.run(engine))

    def test_media_do_not_synchronise_on_a_gpu(self, synchronisation_is_an_error: None) -> None:
        """The tokens of the CPU, without a wait inside a step or an encoding; the second time every picture is encoded anew."""
        engine = self.lab.engine(device="cuda", tokens=self.small_step, prefix=False)
        self.media.run(engine)
        engine.reset_media_cache()
        torch.cuda.set_sync_debug_mode("error")
        outputs = self.media.run(engine)
        torch.cuda.set_sync_debug_mode("default")
        self.media.assert_plain(outputs)

    def test_the_item_of_the_warm_up(self) -> None:
        """As large as is asked for, or a little less, and it can be encoded."""
        needs = self.media.engine.assembly.needs.media
        assert needs is not None
        for most in (max(item.num_embeddings for item in self.media.items), needs.max_embeddings):
            item = self.media.processor.dummy(most)
            assert most / 2 <= item.num_embeddings <= most
            assert self.media.encoded([item]).isfinite().all()
