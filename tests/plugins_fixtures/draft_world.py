"""Drafters of tests: what a request would say without one, wrong tokens, or a mixture. Importable by name from an engine process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from modelrunner import Offer, SamplingParams, hookimpl
from modelrunner.kernels.sampling.philox import PURPOSE_DRAFT
from modelrunner.request import Request
from modelrunner.speculation import DraftBuild, Drafter, DrafterNeeds, DraftStep
from modelrunner.testing import ScriptDrafterPlugin, Subject, dense, ref

Pattern = Callable[[int], bool]
PATTERNS: dict[str, Pattern] = {
    "right": lambda place: True,
    "wrong": lambda place: False,
    "first right": lambda place: place % 3 == 0,
    "every other": lambda place: place % 2 == 0,
}
REPORTS = {"logprobs": None, "prompt_logprobs": None, "output_kind": "final_only"}  # say nothing about tokens


def foreseen(request: Request, subject: Subject) -> list[int]:
    """What the request gives without a drafter."""
    params = request.params.model_copy(update=REPORTS)
    if params.temperature > 0:
        params = params.model_copy(update={"seed": request.seed})
    return list(ref(subject, request.prompt_token_ids, params).token_ids)


def drafted(pattern: Pattern = PATTERNS["right"], turns: Sequence[int] = (), subject: Subject | None = None) -> Subject:
    """The subject with a drafter named `script`: at each place of the output the token without a drafter if `pattern` says so, else the id
    after it. turns: most drafts after a request's first, second, ... step."""
    plain = subject or dense()

    def script(request: Request) -> list[int]:
        own = foreseen(request, plain)
        return [token if pattern(place) else (token + 1) % 331 for place, token in enumerate(own)]

    return replace(plain, plugins=(*plain.plugins, ScriptDrafterPlugin(script, turns)))


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | more)  # type: ignore[arg-type]


def certain(token: int, subject: Subject) -> Subject:
    """The subject with a drafter that always proposes one token."""
    return replace(subject, plugins=(*subject.plugins, ScriptDrafterPlugin(lambda request: [token] * request.params.max_tokens)))


class DrawingDrafter(Drafter):
    """Draws each token from `chances`, id -> probability, by the row's own noise, and says so."""

    chances: Mapping[int, float]

    def declare(self) -> DrafterNeeds:
        return DrafterNeeds(probabilities=True)

    def build(self, build: DraftBuild) -> None:
        self.noise = build.context.ops.gumbel_noise
        self.line = torch.zeros(self.target.vocab_size, device=build.context.device)
        for token, chance in self.chances.items():
            self.line[token] = chance

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        assert probabilities is not None
        seed, choice = (step.columns[name].index_select(0, step.batch.rows) for name in ("seed", "choice"))
        for j in range(step.num_draft):
            noise = self.noise(seed, step.known + j, choice, PURPOSE_DRAFT, len(self.line))
            out[:, j] = (self.line.log() + noise).argmax(-1)
            probabilities[:, j] = self.line


class DrawingPlugin:
    """Offers the drafter `drawing`."""

    MODELRUNNER_API = ">=1.6,<2"

    def __init__(self, chances: Mapping[int, float]) -> None:
        self.kind = type("DrawingDrafter", (DrawingDrafter,), {"chances": dict(chances)})

    @hookimpl
    def drafter(self) -> Offer[type[Drafter]]:
        return Offer("drawing", lambda: self.kind, reason="for tests")


def drawn(chances: Mapping[int, float], subject: Subject) -> Subject:
    """The subject with a drafter named `drawing`."""
    return replace(subject, plugins=(*subject.plugins, DrawingPlugin(chances)))
