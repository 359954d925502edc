"""Steps with drafts: the same tokens in fewer steps, counted and bounded rightly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from mirror_drafter import MirrorPlugin

from modelrunner import LLM, Observer, Offer, RequestFinish, SamplingParams, StepReport, hookimpl
from modelrunner.errors import CheckpointError, PluginError, RequestError, SettingsError, SettingsWarning
from modelrunner.kernels.sampling.philox import PURPOSE_DRAFT
from modelrunner.request import Request
from modelrunner.request_table import Column
from modelrunner.speculation import DraftBuild, Drafter, DrafterNeeds, DraftStep
from modelrunner.testing import Driver, EngineProbe, P, R, ScriptDrafterPlugin, assert_same, dense, ref

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=4, max_tokens=30, ignore_eos=True)
PROMPTS = [P(12, 0), P(40, 1), R(6), P(1, 2), P(33, 3)]


def right(request: Request) -> list[int]:
    """The whole reference output of the request, as long as the tests' longest."""
    params = request.params.model_copy(update={"max_tokens": 40, "stop_token_ids": (), "num_draft_tokens": None})
    return list(ref(dense(), request.prompt_token_ids, params).token_ids)


def wrong(request: Request) -> list[int]:
    return [(token + 1) % 331 for token in right(request)]


def start(script: Callable[[Request], Sequence[int]] = right, turns: Sequence[int] = (), **short: Any) -> Driver:
    subject = replace(dense(), plugins=(*dense().plugins, ScriptDrafterPlugin(script, turns)))
    return Driver(subject.engine(**{"drafter": "script"} | short))


def run_all(driver: Driver, params: Sequence[SamplingParams], prompts: Sequence[list[int]] = PROMPTS) -> None:
    """Run a request for each prompt, arriving one after the other; all must give their reference output."""
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    for number, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
        driver.add(str(number), prompt, given)
        driver.step()
    driver.finish()
    for number, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
        assert_same(dense(), prompt, given.model_copy(update={"num_draft_tokens": None}), driver.result(str(number)))
    probe.assert_clean()


@pytest.mark.parametrize("device", [{}, {"device": "deferred_cpu"}, {"device": "deferred_cpu", "captures": True}], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafts", [1, 3])
def test_right_drafts_are_all_kept(drafts: int, depth: int, device: dict[str, Any]) -> None:
    driver = start(depth=depth, drafts=drafts, **device)
    run_all(driver, [GREEDY, DRAWN, GREEDY, DRAWN, GREEDY])
    stats = driver.engine.scheduler.stats
    assert stats.accepted_at == stats.drafted_at
    assert stats.accepted_at[0] >= 5 * (29 // (1 + drafts))
    assert stats.steps <= len(PROMPTS) + 30 // (1 + drafts) + 3


@pytest.mark.parametrize("depth", [1, 3])
def test_wrong_drafts_change_nothing(depth: int) -> None:
    driver = start(wrong, depth=depth, device="deferred_cpu")
    run_all(driver, [GREEDY, DRAWN, GREEDY, DRAWN, GREEDY])
    stats = driver.engine.scheduler.stats
    assert stats.num_accepted == 0
    assert stats.num_drafted > 300


@pytest.mark.parametrize("turns", [(3, 0, 3, 0, 1, 0, 2), (0, 1)])
def test_drafts_come_and_go(turns: tuple[int, ...]) -> None:
    driver = start(turns=turns, depth=2, device="deferred_cpu")
    run_all(driver, [GREEDY] * 5)
    stats = driver.engine.scheduler.stats
    assert stats.accepted_at == stats.drafted_at
    assert (stats.drafted_at[0] > stats.drafted_at[2]) == (max(turns) == 3 or stats.drafted_at[0] > 0)


@pytest.mark.parametrize("stop", range(9))
def test_stop_ids_and_limits_inside_what_was_accepted(stop: int) -> None:
    """The tokens of a step are cut after a stop id, and at max_tokens, wherever these fall among them."""
    output = right(Request("r", P(12, 0), GREEDY, 0.0, 99, 1))
    params = [
        GREEDY.model_copy(update={"stop_token_ids": (output[stop],)}),
        GREEDY.model_copy(update={"max_tokens": stop + 1}),
    ]
    driver = start(depth=2, device="deferred_cpu")
    run_all(driver, params, [P(12, 0)] * 2)
    assert driver.result("0").stop_reason == output[stop]


def test_a_request_up_to_the_models_length() -> None:
    """Nothing is drafted past the last place, and pages are enough."""
    params = GREEDY.model_copy(update={"max_tokens": None})
    prompt = P(230, 1)
    plain = Driver(dense().engine(depth=1, rows=1))
    plain.add("plain", prompt, params)
    plain.finish()
    want = list(plain.result("plain").token_ids)
    assert len(want) == 26
    driver = start(lambda request: want, depth=3, device="deferred_cpu", pages=17, rows=2)
    driver.add("0", prompt, params)
    driver.finish()
    assert list(driver.result("0").token_ids) == want
    assert driver.engine.scheduler.stats.num_accepted > 15


def test_requests_say_how_many_drafts_they_want() -> None:
    wanted = [0, 1, None, 7, 0]
    driver = start(depth=2, device="deferred_cpu", drafts=3)
    run_all(driver, [GREEDY.model_copy(update={"num_draft_tokens": count}) for count in wanted])
    drafted = [driver.result(str(number)).num_drafted for number in range(5)]
    accepted = [driver.result(str(number)).num_accepted for number in range(5)]
    assert drafted == accepted
    assert [drafted[0], drafted[4]] == [0, 0]
    assert drafted[1] in range(12, 16)
    assert min(drafted[2:4]) > 20
    stats = driver.engine.scheduler.stats
    assert (sum(drafted), sum(accepted)) == (stats.num_drafted, stats.num_accepted)
    with pytest.raises(RequestError, match="num_draft_tokens: got -1"):
        SamplingParams(num_draft_tokens=-1)


def test_many_rows_are_not_drafted() -> None:
    """Above the bound steps have no drafts, and the steady path takes them; below it they have some again."""
    driver = start(depth=2, device="deferred_cpu", off_above_rows=3)
    lengths = [30, 30, 30, 6, 6]
    run_all(driver, [GREEDY.model_copy(update={"max_tokens": length}) for length in lengths])
    accepted = [driver.result(str(number)).num_accepted for number in range(5)]
    assert accepted[3] == accepted[4] == 0
    assert min(accepted[:3]) > 10


def test_edits_of_logits_see_the_drafts_before_them() -> None:
    edited = [
        GREEDY.model_copy(update=update)
        for update in ({"frequency_penalty": 0.7}, {"logit_bias": {50: 5.0}}, {"min_tokens": 12}, {"bad_words": ((7, 9),)}, {})
    ]
    run_all(start(depth=2, device="deferred_cpu"), edited)


def test_choices_are_those_without_a_drafter() -> None:
    params = SamplingParams(temperature=1, seed=5, n=4, max_tokens=12, ignore_eos=True)
    results = []
    for driver in (Driver(dense().engine()), start(wrong, device="deferred_cpu")):
        driver.add("r", P(20, 1), params)
        driver.finish()
        results.append([list(choice.token_ids) for choice in driver.final("r").outputs])
    assert results[0] == results[1]
    assert len({tuple(ids) for ids in results[0]}) == 4


def test_what_a_drafter_may_not_propose_is_left_out() -> None:
    """Ids outside the vocabulary end a proposal; the rest of it counts."""

    def odd(request: Request) -> list[int]:
        return [(token, token, 331, -5)[place % 4] for place, token in enumerate(right(request))]

    driver = start(odd, depth=2, device="deferred_cpu")
    run_all(driver, [GREEDY] * 5)
    stats = driver.engine.scheduler.stats
    assert stats.accepted_at == stats.drafted_at
    assert stats.drafted_at[0] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 3, "captures": True, "tokens": 24, "page_size": 8, "pages": 200},
        {"depth": 2, "tokens": 24, "mixed_tokens": 24, "page_size": 8, "pages": 28},
        {"depth": 2, "prefix": False, "tokens": 7, "mixed_tokens": 7, "rows": 1},
    ],
    ids=str,
)
def test_a_drafters_own_cache_is_right(options: dict[str, Any]) -> None:
    """The drafter is the target with a cache of its own: a wrong entry in it would be a rejected draft, or a page too few."""
    subject = replace(dense(), plugins=(*dense().plugins, MirrorPlugin()))
    driver = Driver(subject.engine(drafter="mirror", device="deferred_cpu", **options))
    run_all(driver, [GREEDY] * 6, [P(12, 0), P(50, 1), R(6), P(50, 1), P(48, 1), P(1, 4)])
    stats = driver.engine.scheduler.stats
    assert stats.accepted_at == stats.drafted_at
    assert stats.num_accepted > 6 * 18
    assert options.get("pages") != 28 or stats.preemptions > 0


def test_a_drafter_of_a_shorter_context() -> None:
    """Rows beyond what it holds go on without drafts, beside others that have some."""
    subject = replace(dense(), plugins=(*dense().plugins, MirrorPlugin(holds=64)))
    driver = Driver(subject.engine(drafter="mirror", device="deferred_cpu"))
    lengths = (60, 63, 64, 65, 120, 230, 10)
    run_all(driver, [GREEDY.model_copy(update={"max_tokens": 20})] * 7, [P(length, 1) for length in lengths])
    drafted = [driver.result(str(number)).num_drafted for number in range(7)]
    assert drafted[2:6] == [0, 0, 0, 0]
    assert drafted[6] > 10


def offering(needs: DrafterNeeds) -> object:
    """A plugin whose drafter `odd` needs this."""

    class Odd(Drafter):
        def declare(self) -> DrafterNeeds:
            return needs

        def propose(self, step: Any, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
            raise AssertionError("it never starts")

    class Plugin:
        MODELRUNNER_API = ">=1.6,<2"

        @hookimpl
        def drafter(self) -> Offer[type[Drafter]]:
            return Offer("odd", lambda: Odd)

    return Plugin()


@pytest.mark.parametrize(
    ("needs", "error", "message"),
    [
        (DrafterNeeds(max_tokens=2), SettingsError, "num_tokens is 3; accepted with the drafter odd .*: at most 2"),
        (DrafterNeeds(tap_points=("layer.9",)), PluginError, r"wants hidden states at \['layer.9'\]; the model has the tap points"),
        (DrafterNeeds(columns=(Column("odd", torch.int32, seats=2),)), PluginError, r"seated columns \['odd'\]"),
    ],
)
def test_what_a_drafter_cannot_have(needs: DrafterNeeds, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(dense().model, plugins=[*dense().plugins, offering(needs)], speculation={"drafter": "odd"}, cache={"num_pages": 64})


def test_settings_of_drafts_without_a_drafter_are_warned_of() -> None:
    def llm(**settings: Any) -> None:
        LLM(dense().model, plugins=dense().plugins, cache={"num_pages": 64}, **settings)

    with pytest.warns(
        SettingsWarning, match=r"^speculation\.num_tokens, speculation\.adaptive: no effect, .* the name of a drafter"
    ) as caught:
        llm(speculation={"adaptive": True}, num_speculative_tokens=5)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingsWarning)
        llm()
        llm(speculation={"drafter": None, "num_tokens": 5})
        llm(speculation={"drafter": "ngram", "num_tokens": 5})
        llm(speculation={"drafter": "ngram", "adaptive": True, "spare_tokens": 9, "acceptance": "typical", "typical_factor": 0.1})
    for setting, other in (("spare_tokens", "adaptive is False"), ("typical_threshold", "acceptance is exact")):
        with pytest.warns(SettingsWarning, match=rf"^speculation\.{setting}: no effect, since speculation\.{other}; accepted beside it"):
            llm(speculation={"drafter": "ngram", setting: 1})


def test_a_request_may_ask_for_more_drafts_than_there_are() -> None:
    for drafter in (None, "ngram"):
        driver = Driver(dense().engine(drafter=drafter))
        many = GREEDY.model_copy(update={"num_draft_tokens": 99})
        driver.add("a", P(12, 1), many)
        driver.finish()
        assert_same(dense(), P(12, 1), many, driver.result("a"))


def test_settings_that_do_not_go_together() -> None:
    def llm(**settings: Any) -> LLM:
        return LLM(dense().model, plugins=dense().plugins, cache={"num_pages": 64}, **settings)

    with pytest.raises(SettingsError, match="max_batched_tokens is 3; lower the one"):
        llm(speculation={"drafter": "ngram"}, scheduler={"max_batched_tokens": 3})
    with pytest.raises(PluginError, match="ngram"):
        llm(speculation={"drafter": "no_such"})
    with pytest.raises(SettingsError, match=r"speculation\.model is 'a/head', but speculation\.drafter is none"):
        llm(speculation={"model": "a/head"})
    with pytest.raises(SettingsError, match=r"pin\.drafter is 'ngram', but speculation\.drafter is none"):
        llm(pin={"drafter": "ngram"})
    with pytest.raises(PluginError, match=r"reads no weights, and speculation\.model names .*: leave it out"):
        llm(speculation={"drafter": "ngram", "model": str(dense().model)})
    with pytest.raises(CheckpointError, match="no such file or folder") as error:
        llm(speculation={"drafter": "draft_model", "model": "./none"})
    assert "asked for by speculation.model = './none'" in error.value.__notes__
    with pytest.raises(CheckpointError, match=r"tensors missing: fc\.weight") as error:
        llm(speculation={"drafter": "eagle", "model": str(dense().model)})
    assert error.value.__notes__ == ["raised while loading the weights of drafter eagle (modelrunner:eagle)"]
    with pytest.raises(SettingsError, match="min_size is 3 and max_size 2"):
        llm(speculation={"drafter": "ngram"}, plugin={"ngram": {"min_size": 3, "max_size": 2}})


class Guessing(Drafter):
    """Draws its tokens from a distribution of its own: id 60 or 61, the first more often the odder the row's newest token."""

    def declare(self) -> DrafterNeeds:
        return DrafterNeeds(probabilities=True)

    def build(self, build: DraftBuild) -> None:
        self.ops = build.context.ops

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        assert probabilities is not None
        row = step.batch.rows.long()
        share = 0.3 + 0.4 * (step.newest % 2).float().unsqueeze(1)
        probabilities[:, :, 60], probabilities[:, :, 61] = share, 1 - share
        for place in range(step.num_draft):
            seed, choice = step.columns["seed"][row], step.columns["choice"][row]
            noise = self.ops.gumbel_noise(seed, step.known + place, choice, PURPOSE_DRAFT, self.target.vocab_size)
            out[:, place] = (probabilities[:, place].log() + noise).argmax(-1)


class GuessingPlugin:
    MODELRUNNER_API = ">=1.6,<2"

    @hookimpl
    def drafter(self) -> Offer[type[Drafter]]:
        return Offer("guessing", lambda: Guessing)


def test_drafts_that_were_drawn() -> None:
    """Some of what was drawn is kept, and nothing comes that the target forbids; greedy requests beside it are as without."""
    subject = replace(dense(), plugins=(*dense().plugins, GuessingPlugin()))
    driver = Driver(subject.engine(drafter="guessing", device="deferred_cpu", rows=16))
    drawn = SamplingParams(temperature=1, max_tokens=60, ignore_eos=True, logit_bias={60: 100.0, 61: 100.0}, top_k=2, min_p=0.0)
    for number in range(30):
        params = drawn.model_copy(update={"seed": number}) if number % 3 else GREEDY
        driver.add(str(number), P(9, number), params)
    driver.finish()
    for number in range(0, 30, 3):
        assert_same(dense(), P(9, number), GREEDY, driver.result(str(number)))
    ids = [token for number in range(30) if number % 3 for token in driver.result(str(number)).token_ids]
    assert set(ids) == {60, 61}
    stats = driver.engine.scheduler.stats
    assert 0 < stats.num_accepted < stats.num_drafted


def test_observers_are_told() -> None:
    class Listening(Observer):
        def __init__(self) -> None:
            self.steps: list[StepReport] = []
            self.ends: list[RequestFinish] = []

        def on_step(self, report: StepReport) -> None:
            self.steps.append(report)

        def on_request_finish(self, event: RequestFinish) -> None:
            self.ends.append(event)

    class Plugin:
        MODELRUNNER_API = ">=1,<2"

        @hookimpl
        def observer(self) -> Observer:
            return heard

    heard = Listening()
    subject = replace(dense(), plugins=(*dense().plugins, ScriptDrafterPlugin(right, (3, 1)), Plugin()))
    driver = Driver(subject.engine(drafter="script", depth=2))
    for number, prompt in enumerate(PROMPTS):
        driver.add(str(number), prompt, GREEDY)
    driver.finish()
    driver.engine.close()
    stats = driver.engine.scheduler.stats
    for told in (heard.steps, heard.ends):
        assert (sum(each.num_drafted for each in told), sum(each.num_accepted for each in told)) == (stats.num_drafted, stats.num_accepted)
    assert stats.num_drafted > 50
    assert sum(step.num_generated for step in heard.steps) == 30 * len(PROMPTS)


@pytest.mark.parametrize("depth", [1, 3])
def test_ngram_finds_what_repeats(depth: int) -> None:
    """A bias makes the output repeat one token, which prompt lookup then proposes."""
    params = [GREEDY.model_copy(update={"logit_bias": {60 + number: 100.0}}) for number in range(5)]
    driver = Driver(dense().engine(drafter="ngram", depth=depth, device="deferred_cpu"))
    run_all(driver, params)
    assert driver.engine.scheduler.stats.num_accepted > 5 * 15
    run_all(Driver(dense().engine(drafter="ngram", depth=depth, device="deferred_cpu", captures=True)), [GREEDY, DRAWN] * 2 + [GREEDY])
