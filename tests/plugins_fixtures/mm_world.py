"""Engines on the tiny multimodal model, prompts with images in them, and what plain torch says of these."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tiny_mm import PLACEHOLDER, SIDE, greedy, image, mm

from modelrunner import Engine, SamplingParams
from modelrunner.media_front import Prepared
from modelrunner.request import CompletionOutput
from modelrunner.testing import Driver, P, options

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NEAR_TIE = 1e-4
Part = int | tuple[int, int]  # a number of text tokens, or an image of so many patches


class Made:
    """A prompt of text and images. pictures: by their place in it, noise of a seed of their own."""

    def __init__(self, parts: Sequence[Part], seed: int = 0) -> None:
        self.pictures: list[Any] = []
        self.short: list[int] = []
        self.full: list[int] = []
        for number, part in enumerate(parts):
            if isinstance(part, int):
                text = P(part, seed + number) if number == 0 else P(part + 1, seed + number)[1:]
                self.short += text
                self.full += text
            else:
                self.pictures.append(image(*part, seed=100 * seed + number))
                self.short.append(PLACEHOLDER)
                self.full += [PLACEHOLDER] * (part[0] * part[1])
        self.key = tuple(parts), seed

    def prompt(self, **more: Any) -> dict[str, Any]:
        """What an engine is given."""
        return {"prompt_token_ids": self.short, **({"multi_modal_data": {"image": list(self.pictures)}} if self.pictures else {}), **more}


made = lru_cache(maxsize=256)(lambda parts, seed=0: Made(parts, seed))


@lru_cache(maxsize=256)
def expected(parts: tuple[Part, ...], seed: int, count: int) -> tuple[list[int], list[float]]:
    one = made(parts, seed)
    return greedy(one.full, one.pictures, count)


def assert_expected(one: Made, result: CompletionOutput) -> None:
    """The output is that of plain torch, up to a near-tie."""
    want, gaps = expected(*one.key, len(result.token_ids))
    got = list(result.token_ids)
    first = next((i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), len(got))
    assert first == len(got) or gaps[first] < NEAR_TIE, f"{one.key}: from output {first} on\n got {got}\nwant {want}"


def engine(arena: int | None = None, more: dict[str, Any] | None = None, media: dict[str, Any] | None = None, **short: Any) -> Driver:
    """A driver of an engine on the deferred device. arena: embeddings that its arena holds. more: settings. media: of that section."""
    subject = mm()
    section = {**({} if arena is None else {"arena_tokens": arena}), **(media or {})}
    settings = {"model": {"name": subject.model}, "media": section} | options(**{"device": "deferred_cpu"} | short) | (more or {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*max_model_len.*")
        driver = Driver(Engine(settings, plugins=subject.plugins))
    if driver.engine.assembly.media.encodes:
        watch_lines(driver.engine)
    return driver


def watch_lines(engine: Engine) -> None:
    """No line is written again while a step in flight reads it, be it for a request that has ended."""
    media: Any = engine.media
    start = media._start

    def watched(items: Any, lines: Any) -> Any:
        for plan in engine.scheduler._in_flight:
            if plan.media is not None:
                assert not set(np.concatenate(lines).tolist()) & set(plan.media.lines.tolist()), "a line is written that a step may read"
        return start(items, lines)

    media._start = watched


def prepared(driver: Driver, one: Made) -> Prepared:
    """The prompt as the front makes it ready; without Pillow, which a machine with a GPU may lack."""
    front = driver.engine.assembly.media.front
    made_of = [front.processor.process("image", picture, {}) for picture in one.pictures]
    items = [replace(item, key=repr((one.key, number)).encode()) for number, item in enumerate(made_of)]
    prompt = front.processor.expand(one.short, items)
    media = front._checked(prompt, items, front.processor.positions(prompt, items)) if items else None
    return Prepared(None, prompt.token_ids, media=media)


class Positions:
    """What a request's tokens had as positions: index in the request -> (time, height, width). Of one request alone."""

    def __init__(self, driver: Driver) -> None:
        self.seen: dict[int, tuple[int, ...]] = {}
        self.clashes: list[int] = []
        state = driver.engine.assembly.state
        original = state.positions

        def watched(batch: Any, out: torch.Tensor) -> torch.Tensor:
            given = original(batch, out)
            rows = given if given.dim() == 2 else given.expand(3, -1)
            for place in torch.nonzero(batch.token_valid).flatten().tolist():
                index, three = int(batch.positions[place]), tuple(rows[:, place].tolist())
                if self.seen.setdefault(index, three) != three:
                    self.clashes.append(index)
            return given

        state.positions = watched  # type: ignore[method-assign]


__all__ = ["GREEDY", "PLACEHOLDER", "SIDE", "Made", "Positions", "assert_expected", "engine", "expected", "made", "prepared"]
