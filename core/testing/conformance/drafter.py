"""The conformance suite of a drafter: what it proposes changes no token, in any schedule, and is its own for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from modelrunner.request import SamplingParams
from modelrunner.speculation import Drafter, DraftStep
from modelrunner.testing.conformance.values import guarded
from modelrunner.testing.drive import Driver
from modelrunner.testing.probe import run_together
from modelrunner.testing.prompts import P, R
from modelrunner.testing.reference import assert_tokens
from modelrunner.testing.subjects import Subject, dense

TOKENS = 24
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "depth_2": {"depth": 2},
    "depth_3": {"depth": 3},
    "few_rows": {"rows": 3},
    "chunks": {"tokens": 37, "mixed_tokens": 37},
    "deferred": {"depth": 3, "device": "deferred_cpu", "device_seed": 1},
    "graphs": {"device": "deferred_cpu", "captures": True, "device_seed": 2},
}
Proposals = dict[tuple[int, ...], list[int]]


@dataclass
class Heard:
    """What a drafter proposed. proposals: a row's tokens -> ids. odd: what was wrong with its probabilities."""

    proposals: Proposals
    odd: str = ""


class DrafterConformance:
    """Outputs are those without the drafter; proposals are a row's own affair. Subclass it in a test file:

        class TestEcho(DrafterConformance):
            drafter = "echo"

            def expected(self, tokens, wanted):
                return [tokens[-1]] * wanted

    drafter: its name, which `speculation.drafter` takes. plugins: plugin objects or module names that bring it; none for an installed one.
    model: folder or hub id of its weights, for `speculation.model`. drafts: how many are asked for a step. expected: see there. subject:
    the target; by default a tiny Llama.
    """

    drafter: ClassVar[str]
    plugins: ClassVar[Sequence[object]] = ()
    model: ClassVar[str] = ""
    drafts: ClassVar[int] = 3

    def expected(self, tokens: list[int], wanted: int) -> list[int] | None:
        """What is proposed to a row that has these tokens, prompt and output, at most `wanted` ids; None if there is no reference."""
        return None

    # ---- engines ---------------------------------------------------------------------------------------------------

    def target(self) -> Subject:
        return dense()

    def subject(self) -> Subject:
        plain = self.target()
        return replace(plain, key=f"{plain.key}-{self.drafter}", plugins=(*plain.plugins, *self.plugins))

    def driver(self, monkeypatch: pytest.MonkeyPatch, **schedule: Any) -> Driver:
        with monkeypatch.context() as patch:  # other engines of the test have no drafter
            if self.model:
                patch.setenv("MODELRUNNER_SPECULATION__MODEL", self.model)
            return Driver(self.subject().engine(drafter=self.drafter, drafts=self.drafts, **schedule))

    def params(self, **more: Any) -> SamplingParams:
        return SamplingParams(**{"temperature": 0, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True} | more)

    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        """Greedy and drawn requests over prompts that repeat themselves and others; one that wants one draft at most, and one none."""
        drawn = {"temperature": 1.0, "top_k": 20}
        plain: list[tuple[list[int], dict[str, Any]]] = [(R(8), {}), (P(9, 1) * 3, {}), (P(33, 2), {}), (R(5), drawn), (P(21, 4), drawn)]
        wishes = [*plain, (P(5, 3) * 4, {"repetition_penalty": 1.2}), (R(6), {"num_draft_tokens": 1}), (R(7), {"num_draft_tokens": 0})]
        return [(prompt, self.params(**more)) for prompt, more in wishes]

    def tokens(self, driver: Driver, requests: Sequence[tuple[list[int], SamplingParams]], preempt: bool = False) -> list[list[int]]:
        """Output tokens of the requests, run together; with `preempt`, each that runs is preempted once on the way."""
        return run_together(driver, requests, 4 if preempt else None)

    def assert_plain(self, found: Sequence[list[int]]) -> None:
        """The outputs of `requests` are those without a drafter, up to a near-tie."""
        cls = type(self)
        if "_plain" not in vars(cls):
            driver = Driver(self.target().engine(depth=1))
            cls._plain = self.tokens(driver, self.requests())  # type: ignore[attr-defined]
        for (prompt, params), got, want in zip(self.requests(), found, vars(cls)["_plain"], strict=True):
            assert_tokens(self.target(), prompt, got, want, greedy=params.temperature == 0)

    def listen(self, driver: Driver) -> Heard:
        """Notes what the engine's drafter proposes from now on. For devices that run work at once."""
        drafting = driver.engine.runner.parts.drafting
        assert drafting is not None
        drafter, heard = drafting.drafter, Heard({})
        original = drafter.propose

        def propose(step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
            original(step, out, probabilities)
            ids, known = step.columns["token_ids"], step.known.tolist()
            for i in step.wants.nonzero()[:, 0].tolist() if step.num_draft else ():
                history = tuple(ids[step.batch.rows[i], : known[i]].tolist())
                line = out[i].tolist()
                heard.proposals.setdefault(history, line[: line.index(-1)] if -1 in line else line)
                if probabilities is not None:
                    heard.odd = heard.odd or odd_probabilities(line, probabilities[i])

        setattr(drafter, "propose", propose)  # noqa: B010  (an instance's method, which mypy forbids to assign)
        return heard

    # ---- tests -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("schedule", list(SCHEDULES))
    def test_tokens_are_those_without_it(self, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Greedy ones; drawn ones too, but of a drafter that gives probabilities, which draws others of the same distribution."""
        driver = self.driver(monkeypatch, **SCHEDULES[schedule])
        self.assert_plain(self.without_chance(driver, self.tokens(driver, self.requests())))
        assert driver.engine.scheduler.stats.num_drafted, "nothing was proposed, which shows nothing"

    def test_goes_on_after_a_preemption(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = self.driver(monkeypatch, device="deferred_cpu")
        self.assert_plain(self.without_chance(driver, self.tokens(driver, self.requests(), preempt=True)))
        assert driver.engine.scheduler.stats.preemptions, "nothing was preempted, which shows nothing"

    def test_proposals_are_a_rows_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same to the same tokens, alone and beside others, in a row that others had. Numbers may round otherwise: a few may differ."""
        together = self.driver(monkeypatch, depth=1)
        heard = self.listen(together)
        requests = [(prompt, params) for prompt, params in self.requests() if params.num_draft_tokens is None]
        self.tokens(together, requests)
        driver = self.driver(monkeypatch, depth=1, rows=1, prefix=False)
        alone = self.listen(driver)
        self.tokens(driver, requests)
        both = set(heard.proposals) & set(alone.proposals)
        assert len(both) >= TOKENS // 2, "too few places were proposed at in both runs"
        other = [history for history in both if heard.proposals[history] != alone.proposals[history]]
        assert len(other) <= len(both) // 20, (
            f"{len(other)} of {len(both)} proposals depend on company, first after the tokens {list(other[0])}: "
            f"{heard.proposals[other[0]]} together, {alone.proposals[other[0]]} alone"
        )

    def test_is_what_the_reference_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.expected([1], self.drafts) is None:
            pytest.skip("no `expected` was given")
        driver = self.driver(monkeypatch, depth=1)
        heard = self.listen(driver)
        self.tokens(driver, self.requests())
        assert heard.proposals
        for history, proposal in heard.proposals.items():
            want = self.expected(list(history), self.drafts)
            assert proposal == want, f"after the tokens {list(history)}: {proposal} was proposed, {want} is expected"

    def test_probabilities_are_what_drafts_were_drawn_from(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = self.driver(monkeypatch, depth=1)
        if not self.needs_probabilities(driver):
            pytest.skip("the drafter gives no probabilities")
        heard = self.listen(driver)
        self.tokens(driver, self.requests())
        assert not heard.odd, heard.odd

    def test_asks_for_no_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a GPU could not do without making the host wait is refused, here on the CPU. Attention is of a kind that a GPU has too."""
        monkeypatch.setenv("MODELRUNNER_PIN__ATTENTION_BACKEND", "paged")
        driver = self.driver(monkeypatch, depth=1)
        drafting = driver.engine.runner.parts.drafting
        assert drafting is not None
        setattr(drafting.drafter, "propose", guarded(drafting.drafter.propose))  # noqa: B010
        self.tokens(driver, self.requests())

    def test_does_not_synchronise_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No wait inside a step (waiting for an earlier step's results is not counted)."""
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        driver = self.driver(monkeypatch, device="cuda")
        self.tokens(driver, self.requests())
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.assert_lengths(self.tokens(driver, self.requests()))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_requests_that_want_none_have_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = self.driver(monkeypatch)
        self.tokens(driver, [(R(8), self.params(num_draft_tokens=0))])
        assert driver.engine.scheduler.stats.num_drafted == 0

    # ---- for subclasses --------------------------------------------------------------------------------------------

    def needs_probabilities(self, driver: Driver) -> bool:
        drafting = driver.engine.runner.parts.drafting
        assert drafting is not None
        assert isinstance(drafting.drafter, Drafter)
        return drafting.needs.probabilities

    def without_chance(self, driver: Driver, found: Sequence[list[int]]) -> list[list[int]]:
        """The outputs, with those in whose place a drafter's own draws may put others replaced by what is expected."""
        if not self.needs_probabilities(driver):
            return list(found)
        self.assert_lengths(found)
        plain = self.tokens(Driver(self.target().engine(depth=1)), self.requests())
        pairs = zip(self.requests(), found, plain, strict=True)
        return [other if params.temperature > 0 else own for (_, params), own, other in pairs]

    def assert_lengths(self, found: Sequence[list[int]]) -> None:
        assert [len(output) for output in found] == [params.max_tokens for _, params in self.requests()]


def odd_probabilities(line: Sequence[int], probabilities: torch.Tensor) -> str:
    """What is wrong with the probabilities [k, V] of a row's drafts [k], -1 for none; empty if nothing is."""
    for j, token in enumerate(line):
        if token == -1:
            break
        total, own = float(probabilities[j].sum()), float(probabilities[j, token])
        if not abs(total - 1) < 1e-3 or not own > 0 or float(probabilities[j].min()) < 0:
            return f"draft {j} is {token}, with probability {own}, of probabilities that add up to {total}; they must add up to 1"
    return ""
