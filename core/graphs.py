"""Captured steps: graphs for few shapes, replayed with new inputs in the same places.

A step of decode rows only is one graph from the gather to the record, for each number of rows and kind of tail. A step with prompts is two:
the body (gather, layers, hidden states to sample from), for each number of query tokens, and the tail (head, sampling, record), for each
number of rows and kind. With a drafter there are such graphs with drafts too; its own part belongs to the former, and is a third graph
beside the latter, for each number of query tokens. Their closures see the runner's buffers at full width and the bounds of the longest
request, so nothing in them
depends on a plan; the first step of a shape runs the closure as it is (which also builds its kernels), the second records it. What the
start-up captured is ready from the first step on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from modelrunner.attention import AttentionBackend
from modelrunner.batch import EDITED, MASKED, Feature, Plan, as_built
from modelrunner.device import Device
from modelrunner.draft_policy import DraftPolicy
from modelrunner.model_state import ModelState, Needs, No, answer_of
from modelrunner.step_buffers import LONGEST, Buckets, Shape

KINDS = (Feature.GREEDY, Feature.PLAIN)  # tails of decode steps captured at start-up; others on their second use
# Features of tails that can be captured, beside those of logits processors: not those of taps, nor of log-probs of prompts and of whole
# vocabularies.
CAPTURED = Feature.PLAIN | Feature.FILTERED | EDITED | Feature.LOGPROBS | Feature.MEDIA
# Tails whose kernels are built at start-up: all that rows of built-in features may ask for.
_DRAWS = (Feature.GREEDY, Feature.PLAIN, Feature.PLAIN | Feature.FILTERED)
_EDITS = (Feature.GREEDY, MASKED, EDITED)
BUILT = tuple(draw | edits | told for draw in _DRAWS for edits in _EDITS for told in (Feature.GREEDY, Feature.LOGPROBS))


class Key(NamedTuple):
    """What tells one graph from another. size: padded query tokens of a body or a draft part, padded rows of a tail or of a step of decode
    rows. features: of the tail; of a body and a draft part GREEDY or MEDIA. num_draft, num_next: as in a plan."""

    part: Literal["step", "body", "tail", "draft"]
    size: int
    features: Feature = Feature.GREEDY
    num_draft: int = 0
    num_next: int = 0

    @property
    def tail(self) -> Key:
        """That of a step."""
        return Key("tail", self.size, self.features, self.num_draft)


class DraftKinds(NamedTuple):
    """policy: how many drafts steps have, of at most max_tokens query tokens. captured: whether the drafter's part is."""

    policy: DraftPolicy
    max_tokens: int
    captured: bool


@dataclass(frozen=True)
class GraphReport:
    """What start-up captured: steps of decode rows, and bodies of steps with prompts. seconds: wall time. num_bytes: device memory taken.
    reason: why nothing was captured."""

    steps: int = 0
    bodies: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"none: {self.reason}"
        parts = f"{self.steps} decode steps and {self.bodies} bodies of mixed steps"
        return f"{parts} captured in {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows to capture: where a kernel's tile ends, further apart as padding costs less. The last one is max_rows."""
    sizes = [1, 2, 4]
    for end, step in ((64, 8), (128, 16), (256, 32), (512, 64), (max(max_rows, 512), 128)):
        sizes += range(sizes[-1] // 8 * 8 + (8 if sizes[-1] < 8 else step), end + 1, step)
    return (*(size for size in sizes if size < max_rows), max_rows)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Numbers of query tokens of a step with prompts to capture, further apart as steps grow. The last one is max_tokens; 0: none."""
    sizes: list[int] = []
    for end, step in ((64, 16), (256, 32), (512, 64), (1024, 128), (2048, 256), (4096, 512), (max(max_tokens, 4096), 1024)):
        sizes += range((sizes[-1] if sizes else 0) + step, end + 1, step)
    return (*(size for size in sizes if size < max_tokens), max_tokens) if max_tokens else ()


def capture_problem(eager: bool, device: Device, state: ModelState, needs: Needs, backends: Mapping[str, AttentionBackend]) -> str:
    """Why steps cannot be captured; empty if they can."""
    if eager:
        return "graphs.eager is set"
    if not device.captures:
        return f"device {device.name!r} captures no graphs"
    if needs.capture == "none":
        return f"{type(state).__name__}: {needs.capture_reason}"
    if isinstance(answer := answer_of(state, "graphs"), No):
        return f"{type(state).__name__}: {answer.reason}"
    return uncapturable(backends)


def uncapturable(backends: Mapping[str, AttentionBackend]) -> str:
    """Which attention backends cannot be captured; empty if all can."""
    unable = [f"{name} ({type(b).__name__})" for name, b in backends.items() if not b.capturable or b.needs_host_lengths]
    return f"the attention backends of {', '.join(unable)} cannot be captured" if unable else ""


class StepGraphs:
    """Keeps a closure, and once it is captured a replay, for each key. `run` is called where the step's work runs: in stream order."""

    def __init__(
        self,
        device: Device,
        buckets: Buckets,
        make: Callable[[Key], Callable[[], None]],
        reason: str = "",
        features: Feature = CAPTURED,
        bodies: Sequence[Feature] = (Feature.GREEDY,),
        drafts: DraftKinds | None = None,
    ) -> None:
        """buckets: shapes that may be captured. make: builds the closure of a key. reason: why nothing is to be captured. features: those
        that a captured step may have. bodies: the kinds of bodies that start-up captures. drafts: with a drafter."""
        self._drafts = drafts
        self.device = device
        self.reason = reason
        self._rows, self._tokens = ((), ()) if reason else (tuple(buckets.rows), tuple(buckets.tokens))
        self._make = make
        self._bodies = tuple(bodies)
        self._uncaptured = ~int(features)
        self._closures: dict[Key, Callable[[], None]] = {}
        self._replays: dict[Key, Callable[[], None]] = {}

    @property
    def most_tokens(self) -> int:
        """Query tokens of the largest step that may be captured; 0 if nothing is."""
        return max([*self._rows, *self._tokens], default=0)

    @property
    def count(self) -> int:
        """Graphs that start-up captures."""
        return len(self.first)

    @property
    def rare(self) -> list[Key]:
        """What brings up the kernels that start-up captures nothing with. Tails: what chooses tokens is of two kinds, for few rows and for
        many. With a drafter also heads of every number of lines, and steps of decode rows of which none has a draft."""
        most, drafts = dict.fromkeys((*self._rows[:1], *self._rows[-1:])), self._drafts
        numbers = [0] if drafts is None else sorted({0, *drafts.policy.choices})
        found = [Key("tail", rows, features, k) for rows in most for k in numbers for features in BUILT]
        if drafts is not None:
            found += [Key("tail", rows, Feature.GREEDY, k) for rows in self._rows for k in numbers]
            found += [Key("step", rows, Feature.GREEDY, 0, after) for rows in self._rows for after in (0, drafts.policy.most)]
        return list(dict.fromkeys(found))

    @property
    def captured(self) -> list[Key]:
        """What is ready to be replayed."""
        return list(self._replays)

    def keys(self, plan: Plan, shape: Shape) -> tuple[Key, ...]:
        """The graphs that run `plan`, padded to `shape`, one after the other; none for a step that is not captured."""
        if int(plan.features) & self._uncaptured:
            return ()
        media = plan.features & Feature.MEDIA
        features = as_built(Feature(int(plan.features) & ~int(Feature.MEDIA)))  # ~MEDIA would drop the bits of processors
        num_draft, num_next = plan.num_draft, plan.num_next
        if plan.num_decode == plan.num_rows:
            if media:  # the last token of a prompt is one of media: too rare for a graph
                return ()
            return (Key("step", shape.num_rows, features, num_draft, num_next),) if shape.num_rows in self._rows else ()
        if shape.num_tokens not in self._tokens or plan.max_query > LONGEST:
            return ()
        body = Key("body", shape.num_tokens, media, num_draft)
        tail = Key("tail", shape.tail_rows, features, num_draft)
        if self._drafts is None or not self._drafts.captured:
            return body, tail
        return body, tail, Key("draft", shape.num_tokens, media, num_draft, num_next)

    @property
    def with_drafts(self) -> bool:
        """Whether the drafter's part is captured with the steps."""
        return self._drafts is not None and self._drafts.captured

    @property
    def first(self) -> list[Key]:
        """What start-up captures, from large to small. Steps with fewer drafts after them than in them are left for their second use."""
        choices = (0,) if self._drafts is None else self._drafts.policy.choices
        sizes = [(tokens, k) for tokens in reversed(self._tokens) for k in sorted({0, *choices})]
        bodies = [Key("body", tokens, kind, k) for tokens, k in sizes for kind in self._bodies]
        rising = zip((0, *self._rows), self._rows, strict=False)
        steps = [Key("step", rows, kind, k, k) for less, rows in rising for k in reversed(self._ks(less + 1, rows)) for kind in KINDS[::-1]]
        steps.reverse()
        if self._drafts is not None and self._drafts.captured:
            pairs = dict.fromkeys([(0, choices[0]), *((k, k) for k in choices)])
            shapes = [(tokens, kind) for tokens in reversed(self._tokens) for kind in self._bodies]
            bodies += [Key("draft", tokens, kind, k, after) for tokens, kind in shapes for k, after in pairs]
        return bodies + steps

    def _ks(self, fewest: int, most: int) -> tuple[int, ...]:
        """Drafts that steps of so many decode rows may have, from the largest on."""
        return (0,) if self._drafts is None else self._drafts.policy.possible(fewest, most, self._drafts.max_tokens)

    def run(self, key: Key) -> None:
        """D. Run the step of `key` on the inputs that are staged."""
        if (replay := self._replays.get(key)) is not None:
            replay()
        elif key in self._closures:
            self.capture(key)
            self._replays[key]()
        else:
            closure = self._make(key)
            closure()
            self._closures[key] = closure

    def capture(self, key: Key) -> None:
        """Record the closure of `key`, which has run before, or whose kernels are built."""
        self._replays[key] = self.device.capture(self._closures[key])

    def forget(self) -> None:
        """Drop all graphs, e.g. because memory that they name has moved. They are captured again as they are used."""
        self._replays.clear()
        self.device.forget_graphs()

    def capture_all(
        self, stage: Callable[[Key], None], progress: Callable[[Sequence[Key]], Iterable[Key]], built: Container[Key] = ()
    ) -> GraphReport:
        """Capture every body, and every step of decode rows with each of `KINDS`, from large to small, so that they share a pool of memory.

        stage: puts a harmless step of a key's shape into the input buffers. progress: wraps the sequence in a progress bar. built: those
        that need no run before they are captured.
        """
        if self.reason:
            return GraphReport(reason=self.reason)
        began, free = time.monotonic(), self.device.memory()[0]
        keys = self.first
        for key in progress(keys):
            stage(key)
            if key in built:
                self._closures[key] = self._make(key)
            else:
                self.device.launch(lambda key=key: self.run(key))  # type: ignore[misc]
            self.device.launch(lambda key=key: self.capture(key))  # type: ignore[misc]
        self.device.synchronize()
        steps = sum(key.part == "step" for key in keys)
        bodies = sum(key.part == "body" for key in keys)
        return GraphReport(steps, bodies, time.monotonic() - began, max(free - self.device.memory()[0], 0))
