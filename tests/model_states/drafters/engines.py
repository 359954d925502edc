"""Engines whose drafter has weights, on the tiny target of `heads`; and what the drafter sees and says in them, step by step."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from modelrunner import Engine
from modelrunner.speculation import DraftStep
from modelrunner.testing import ByteTokenizerPlugin, Driver, Subject, options
from tests.model_states.drafters import heads
from tests.model_states.drafters.papers import Papers

KINDS = ("draft_model", "eagle3", "mtp", "eagle", "medusa")


@cache
def root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="modelrunner-drafters-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def target() -> Path:
    return heads.write(root() / "target", heads.TARGET, heads.target_tensors() | heads.mtp_tensors())


@cache
def subject() -> Subject:
    return Subject(str(target()), "drafted", (ByteTokenizerPlugin(),))


@cache
def papers() -> Papers:
    return Papers(target())


@cache
def head(kind: str, loud: bool = False) -> str:
    """The folder of the drafter's weights; empty where they lie with the target's."""
    if kind == "mtp" and not loud:
        return ""
    config, tensors = {
        "draft_model": lambda: (heads.TARGET, heads.draft_model_tensors()),
        "eagle": lambda: (heads.eagle_config(), heads.eagle_tensors(loud=loud)),
        "eagle3": lambda: (heads.EAGLE3, heads.eagle3_tensors(loud=loud)),
        "mtp": lambda: (heads.TARGET, heads.mtp_tensors(loud=loud)),
        "medusa": lambda: (heads.MEDUSA, heads.medusa_tensors()),
    }[kind]()
    return str(heads.write(root() / f"{kind}{'-loud' * loud}", config, tensors))


def start(kind: str, folder: str | Path | None = None, *, k: int = 3, more: Mapping[str, Any] | None = None, **short: Any) -> Driver:
    """An engine with a drafter. folder: of its weights, where they are others. more: settings. short: see `modelrunner.testing.options`."""
    speculation = {"drafter": kind, "num_tokens": k, "model": head(kind) if folder is None else str(folder)}
    settings = {"model": {"name": str(target())}} | options(**short) | {"speculation": speculation} | dict(more or {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*max_model_len.*")
        return Driver(Engine(settings, plugins=[ByteTokenizerPlugin()]))


@dataclass
class Watch:
    """Everything that an engine's drafter was given and proposed, by the tokens that a row knew then.

    proposals: known tokens -> drafts, of rows that want some. inputs: (known tokens, first position of the step, pairs of a position and
    the id that follows it) for each row of each step.
    """

    proposals: dict[tuple[int, ...], list[tuple[int, ...]]] = field(default_factory=dict)
    inputs: list[tuple[tuple[int, ...], int, list[tuple[int, int]]]] = field(default_factory=list)

    @classmethod
    def of(cls, driver: Driver) -> Watch:
        watch, drafter = cls(), driver.engine.runner.parts.drafter
        assert drafter is not None
        propose = drafter.propose

        def watched(step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
            propose(step, out, probabilities)
            watch.note(step, out)

        drafter.propose = watched  # type: ignore[method-assign]
        return watch

    def note(self, step: DraftStep, out: torch.Tensor) -> None:
        batch = step.batch
        for i in range(batch.num_rows):
            if not batch.query_len[i]:
                continue
            row, first = int(batch.rows[i]), int(batch.query_start[i])
            known = tuple(step.columns["token_ids"][row, : int(step.known[i])].tolist())
            places = range(first, int(step.last_place[i]) + 1)
            pairs = [(int(step.positions[place]), int(step.next_ids[place])) for place in places]
            self.inputs.append((known, int(batch.computed[i]), pairs))
            useful = int(step.columns["limit"][row]) - 1 - len(known)  # the others are for places that the row does not reach
            if step.wants[i] and useful > 0:
                self.proposals.setdefault(known, []).append(tuple(out[i, :useful].tolist()))

    def check_inputs(self) -> None:
        """Each position is paired with the known token that follows it, wherever chunks end."""
        for known, computed, pairs in self.inputs:
            assert pairs == [(computed + i, known[computed + i + 1]) for i in range(len(pairs))]

    def check_proposals(self, kind: str, loud: bool = False) -> int:
        """All proposals are the oracle's, up to near-ties; returns how many drafts were compared."""
        return sum(papers().check(kind, known, drafts, loud) for known, found in self.proposals.items() for drafts in found)
