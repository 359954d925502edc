"""The conformance suite of a logits processor: it changes the rows that ask, as its reference says, and no others, in any schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from modelrunner.batch import Batch
from modelrunner.errors import RequestError
from modelrunner.request import Request, SamplingParams
from modelrunner.sampler import Processors
from modelrunner.testing.drive import Driver
from modelrunner.testing.probe import EngineProbe, run_together
from modelrunner.testing.prompts import P
from modelrunner.testing.script_drafter import DRAFTER_NAME, ScriptDrafterPlugin
from modelrunner.testing.subjects import Subject, dense

TOKENS = 24
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "depth_2": {"depth": 2},
    "depth_3": {"depth": 3},
    "few_rows": {"rows": 3},
    "chunks": {"tokens": 13},
    "deferred": {"depth": 3, "device": "deferred_cpu", "device_seed": 1},
    "graphs": {"device": "deferred_cpu", "captures": True, "device_seed": 2},
    "drafts": {"drafter": DRAFTER_NAME, "drafts": 3},
}
Seen = Callable[[torch.Tensor, torch.Tensor, Batch], None]


class LogitsProcessorConformance:
    """A processor changes the rows that ask, and no others, whatever the schedule. Subclass it in a test file:

        class TestNoRepeat(LogitsProcessorConformance):
            processor = "no_repeat"
            arguments = ({"size": 1}, {"size": 2})
            wrong_arguments = ({"size": 0},)

            def expected(self, prompt, output, logits, arguments):
                ...

    processor: its name. plugins: plugin objects or module names that bring it; none for an installed one. arguments: some that a request
    may give; {} if it takes none. wrong_arguments: some that must be refused. expected: see there; without it nobody says what is right.
    """

    processor: ClassVar[str]
    plugins: ClassVar[Sequence[object]] = ()
    arguments: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    wrong_arguments: ClassVar[Sequence[Mapping[str, Any]]] = ()

    def expected(self, prompt: list[int], output: list[int], logits: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor | None:
        """What the processor makes of the logits [V] of one row that has this prompt and output; None if there is no reference."""
        return None

    # ---- engines ---------------------------------------------------------------------------------------------------

    def subject(self) -> Subject:
        plain = dense()
        return Subject(plain.model, f"{plain.key}-{self.processor}", (*plain.plugins, *self.plugins))

    def params(self, arguments: Mapping[str, Any] | None, **more: Any) -> SamplingParams:
        """Of a request with these arguments; None for one that does not ask."""
        asked = {} if arguments is None else {self.processor: arguments}
        return SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logits_processors": asked} | more)

    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        """Greedy and drawn requests that ask, with each of the arguments, beside some that do not. Two prompts repeat themselves."""
        wishes: list[Mapping[str, Any] | None] = [*self.arguments, None] * 2
        prompts = [P(9, 1) * 3, P(21, 2), P(5, 3) * 4, *(P(12 + s, s) for s in range(4, 4 + len(wishes)))]
        drawn: Mapping[str, Any] = {"temperature": 1.0, "seed": 7, "top_k": 20}
        return [(prompts[i], self.params(wish, **(drawn if i % 3 == 2 else {}))) for i, wish in enumerate(wishes)]

    def tokens(self, driver: Driver, requests: Sequence[tuple[list[int], SamplingParams]], preempt: bool = False) -> list[list[int]]:
        """Output tokens of the requests, run together; with `preempt`, each that runs is preempted once on the way."""
        return run_together(driver, requests, 6 if preempt else None)

    def alone(self) -> list[list[int]]:
        """What each request gives alone, without steps in flight; found once a class."""
        cls = type(self)
        if "_alone" not in vars(cls):
            cls._alone = [  # type: ignore[attr-defined]
                self.tokens(Driver(self.subject().engine(depth=1, rows=1, prefix=False)), [request])[0] for request in self.requests()
            ]
        found: list[list[int]] = vars(cls)["_alone"]
        return found

    def drafted(self, subject: Subject) -> Subject:
        """The subject with a drafter of which two drafts of three are right, for the schedule that uses it."""
        found = {tuple(prompt): output for (prompt, _), output in zip(self.requests(), self.alone(), strict=True)}

        def script(request: Request) -> list[int]:
            output = found[tuple(request.prompt_token_ids)]
            return [token if place % 3 else (token + 1) % 331 for place, token in enumerate(output)]

        return replace(subject, plugins=(*subject.plugins, ScriptDrafterPlugin(script)))

    def assert_drafted(self, driver: Driver) -> None:
        """Rows that ask had drafts if the processor allows them, and others had some."""
        names = {name for name, (_, params) in enumerate(self.requests()) if params.logits_processors}
        finals = [driver.final(str(name)) for name in range(len(self.requests()))]
        asking = sum(choice.num_drafted for name in names for choice in finals[name].outputs)
        allowed = self.stage(driver).processors[self.processor].drafts
        assert bool(asking) is allowed, f"drafts is {allowed}, and rows that ask had {asking} drafts"
        assert driver.engine.scheduler.stats.num_accepted > 0

    def stage(self, driver: Driver) -> Processors:
        (stage,) = (stage for stage in driver.engine.assembly.sampler.stages if isinstance(stage, Processors))
        return stage

    def watch(self, seen: Seen, requests: Sequence[tuple[list[int], SamplingParams]]) -> None:
        """Run the requests, handing the logits before and after each call to `seen`; raises the first AssertionError that it raised."""
        driver = Driver(self.subject().engine())
        wrong: list[AssertionError] = []
        processor = self.stage(driver).processors[self.processor]
        original = processor.apply

        def apply(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
            before = logits.clone()
            after: torch.Tensor = original(logits, batch)
            try:
                seen(before, after, batch)
            except AssertionError as error:  # here it would be taken for one of the processor's
                wrong.append(error)
            return after

        processor.apply = apply  # type: ignore[method-assign]
        self.tokens(driver, requests)
        if wrong:
            raise wrong[0]

    # ---- tests -----------------------------------------------------------------------------------------------------

    def test_rows_that_do_not_ask_are_left_alone(self) -> None:
        """Of any step, those of prompts among them. What is impossible stays so."""
        calls: list[int] = []

        def seen(before: torch.Tensor, after: torch.Tensor, batch: Batch) -> None:
            silent = batch.per_row(f"processor.{self.processor}") == 0
            assert torch.equal(after[silent], before[silent]), "the logits of a row that does not ask were changed"
            assert (after[before == -torch.inf] == -torch.inf).all(), "an id that was impossible has become possible"
            calls.append(int(silent.sum()))

        requests = self.requests()
        banning = [(prompt, params.model_copy(update={"bad_words": [[7], [8]]})) for prompt, params in requests]
        self.watch(seen, requests[:4] + banning[:4])
        assert sum(calls), "no call had a row that does not ask"

    def test_is_what_the_reference_says(self) -> None:
        if self.expected([1], [], torch.zeros(3), self.arguments[0]) is None:
            pytest.skip("no `expected` was given")
        compared: list[int] = []

        def seen(before: torch.Tensor, after: torch.Tensor, batch: Batch) -> None:
            ids, known, start = (batch.per_row(name) for name in ("token_ids", "known", "prompt_len"))
            for i in (batch.samples & (batch.per_row(f"processor.{self.processor}") != 0)).nonzero()[:, 0].tolist():
                tokens = ids[i, : int(known[i])].tolist()
                prompt, output = tokens[: int(start[i])], tokens[int(start[i]) :]
                wish = asked[tuple(prompt)]
                want = self.expected(prompt, output, before[i].clone(), wish)
                assert want is not None
                where = f"{dict(wish)}, prompt {prompt}, output {output}: "
                torch.testing.assert_close(after[i], want, msg=where.__add__)
                compared.append(i)

        requests = [request for request in self.requests() if request[1].logits_processors]
        asked = {tuple(prompt): params.logits_processors[self.processor] for prompt, params in requests}
        self.watch(seen, requests)
        assert len(compared) >= TOKENS * len(requests)

    @pytest.mark.parametrize("schedule", list(SCHEDULES))
    def test_tokens_do_not_depend_on_the_schedule(self, schedule: str) -> None:
        """Alone or in a batch, in rows that others had, with steps in flight, in chunks, in graphs if it may."""
        driver = Driver(self.drafted(self.subject()).engine(**SCHEDULES[schedule]))
        assert self.tokens(driver, self.requests()) == self.alone()
        if schedule == "drafts":
            self.assert_drafted(driver)
        if schedule == "graphs":
            stage = self.stage(driver)
            captured = any(stage.bits[self.processor] & key.features for key in driver.engine.runner.graphs.captured)
            assert captured is stage.processors[self.processor].captured

    def test_goes_on_after_a_preemption(self) -> None:
        driver = Driver(self.subject().engine(device="deferred_cpu"))
        assert self.tokens(driver, self.requests(), preempt=True) == self.alone()
        assert driver.engine.scheduler.stats.preemptions, "nothing was preempted, which shows nothing"

    def test_is_called_only_if_a_row_asks(self) -> None:
        calls: list[int] = []

        def seen(before: torch.Tensor, after: torch.Tensor, batch: Batch) -> None:
            calls.append(batch.num_rows)

        self.watch(seen, [(P(9, 1), self.params(None))])
        assert calls == []
        self.watch(seen, [(P(9, 1), self.params(self.arguments[0]))])
        assert calls

    def test_wrong_arguments_are_refused(self) -> None:
        driver = Driver(self.subject().engine())
        for wrong in self.wrong_arguments:
            with pytest.raises(RequestError, match=rf"logits_processors\['{self.processor}'\]: .*"):
                driver.add("wrong", P(9, 1), self.params(wrong))
        EngineProbe(driver).assert_alive(self.subject())
