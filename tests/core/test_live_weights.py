"""Weights replaced and cache memory given up while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from modelrunner import LLM, OutputKind, SamplingParams
from modelrunner.engine import EngineError
from modelrunner.errors import CheckpointError, RequestError
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, assert_tokens, dense, options, ref

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)


def tensors(subject: Subject) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(Path(subject.model) / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def first_half(driver: Driver, params: SamplingParams, at: int, prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        driver.add(name, prompt, params)
    driver.step_until(lambda: min(driver.num_tokens(name) for name in prompts) >= at)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_running_requests_go_on_with_the_new_weights(depth: int, params: SamplingParams) -> None:
    """What comes after the update is what the new model says after the tokens before it."""
    driver = Driver(dense(1).engine(depth=depth, device="deferred_cpu", tokens=16))
    prompts = {"a": P(20, 1), "b": P(33, 2)}
    first_half(driver, params, 3, prompts)
    driver.engine.update_weights(tensors(dense(2)), "second")
    kept = {name: list(driver.engine.scheduler.tokens_of(driver.engine.requests[name])) for name in prompts}
    driver.finish()
    for name, prompt in prompts.items():
        assert 3 <= len(kept[name]) < 12
        old = list(ref(dense(1), prompt, params).token_ids)
        assert_tokens(dense(1), prompt, kept[name], old[: len(kept[name])], greedy=False)
        got = list(driver.result(name).token_ids)
        assert got[: len(kept[name])] == kept[name]
        rest = params.model_copy(update={"max_tokens": 12 - len(kept[name])})
        want = ref(dense(2), prompt + kept[name], rest)
        assert_tokens(dense(2), prompt + kept[name], got[len(kept[name]) :], want.token_ids, greedy=params.temperature == 0)
        assert driver.final(name).weight_version == "second"
    EngineProbe(driver).assert_clean()


def test_log_probs_of_a_prompt_are_of_one_version() -> None:
    """Also where the update comes between two chunks of the prompt."""
    params, prompt = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), P(40, 1)
    driver = Driver(dense(1).engine(depth=1, tokens=8, rows=1))
    driver.add("r", prompt, params)
    driver.step()
    driver.step()
    assert not driver.num_tokens("r")
    driver.engine.update_weights(tensors(dense(2)), "new")
    driver.finish()
    with dense(2).llm() as llm:
        (want,) = llm.generate(prompt, params, use_tqdm=False)
    given = [[next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]] for output in (driver.final("r"), want)]
    torch.testing.assert_close(torch.tensor(given[0]), torch.tensor(given[1]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_what_ends_before_its_next_token_names_the_version_of_its_last(kind: OutputKind) -> None:
    driver = Driver(dense(1).engine(depth=1))
    for name in "ab":
        driver.add(name, P(20, 1), GREEDY.model_copy(update={"output_kind": kind}))
    for _ in range(6):
        driver.step()
    for version in ("second", "third"):
        driver.engine.update_weights(tensors(dense(2)), version)
    driver.engine.abort("a")
    driver.finish()
    assert (driver.final("a").outputs[0].finish_reason, driver.final("a").weight_version) == ("abort", "0")
    assert driver.final("b").weight_version == "third"


def test_versions_are_named_and_keep_cached_prefixes_apart() -> None:
    driver = Driver(dense(1).engine())
    seen = []
    for turn, model in enumerate([1, 1, 2, 2, 1]):
        if turn in (2, 4):
            driver.engine.update_weights(tensors(dense(model)))
        driver.add(str(turn), P(40, 1), GREEDY)
        driver.finish()
        assert_same(dense(model), P(40, 1), GREEDY, driver.result(str(turn)))
        seen.append((driver.final(str(turn)).weight_version, driver.final(str(turn)).num_cached_tokens))
    assert seen == [("0", 0), ("0", 32), ("1", 0), ("1", 32), ("2", 0)]
    assert driver.engine.weight_version == "2"


def test_pages_of_the_old_weights_serve_nobody() -> None:
    """Also those of a request that ran through the update, under a version that was in use before."""
    driver = Driver(dense(1).engine(depth=2))
    first_half(driver, GREEDY, 3, {"a": P(40, 1)})
    driver.engine.update_weights(tensors(dense(2)), "0")
    driver.add("b", P(40, 1), GREEDY)
    driver.finish()
    assert_same(dense(2), P(40, 1), GREEDY, driver.result("b"))


def test_a_failed_update_stops_the_engine_until_one_succeeds() -> None:
    driver = Driver(dense(1).engine(depth=2))
    first_half(driver, GREEDY, 2, {"a": P(20, 1)})
    some = dict(list(tensors(dense(2)))[:3])
    with pytest.raises(CheckpointError, match=r"the set of new weights does not fit the model\. .* tensors missing"):
        driver.engine.update_weights(some.items())
    with pytest.raises(EngineError, match=r"the weights are a mixture, since the last update_weights failed \(CheckpointError.*missing"):
        driver.step()
    driver.engine.update_weights(tensors(dense(1)))
    driver.finish()
    assert_same(dense(1), P(20, 1), GREEDY, driver.result("a"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "tensors missing"),
        ([("x", torch.zeros(1))], "1 tensors not expected: x"),
        ([("model.norm.weight", torch.zeros(1))], r"1 tensors that do not fit: model\.norm\.weight"),
        ([("lm_head.weight", torch.zeros(1, 1))], "tensors that do not fit: lm_head"),
    ],
)
def test_a_failed_update_that_stored_nothing_leaves_the_engine_as_it_was(given: list[tuple[str, torch.Tensor]], message: str) -> None:
    llm = dense(1).llm()
    with pytest.raises(CheckpointError, match=message):
        llm.update_weights(given)
    (output,) = llm.generate({"prompt_token_ids": P(20, 1)}, GREEDY)
    assert output.weight_version == "0"
    assert_same(dense(1), P(20, 1), GREEDY, output.outputs[0])


def test_an_update_that_stored_nothing_repairs_nothing() -> None:
    driver = Driver(dense(1).engine())
    for given in (list(tensors(dense(2)))[:3], []):
        with pytest.raises(CheckpointError):
            driver.engine.update_weights(given)
        with pytest.raises(EngineError, match="the weights are a mixture"):
            driver.step()


def test_an_update_that_brings_nothing_changes_nothing() -> None:
    driver = Driver(dense(1).engine())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise OSError("the sender is gone")
        yield

    with pytest.raises(OSError, match="the sender is gone"):
        driver.engine.update_weights(broken())
    with pytest.raises(RequestError, match="version: got ''"):
        driver.engine.update_weights(tensors(dense(2)), "")
    EngineProbe(driver).assert_alive(dense(1))
    assert driver.engine.weight_version == "0"


def test_llm_updates_weights() -> None:
    llm = dense(1).llm()
    llm.update_weights(tensors(dense(2)), "next")
    (output,) = llm.generate({"prompt_token_ids": P(20, 1)}, GREEDY)
    assert output.weight_version == "next"
    assert_same(dense(2), P(20, 1), GREEDY, output.outputs[0])


def test_a_mapping_is_as_good_as_pairs() -> None:
    """Such as a state dict."""
    llm = dense(1).llm()
    llm.update_weights(dict(tensors(dense(2))))
    assert_same(dense(2), P(20, 1), GREEDY, llm.generate({"prompt_token_ids": P(20, 1)}, GREEDY)[0].outputs[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "tensors: got an int"),
        (torch.zeros(2, 2), "tensors: got a Tensor"),
        ({"x": 1}, "got the pair of 'x' and an int"),
        (["x"], "got a str in place of a pair"),
        ([torch.zeros(2)], "got a Tensor in place of a pair"),
    ],
)
def test_what_holds_no_tensors_is_refused(given: Any, message: str) -> None:
    llm = dense(1).llm()
    with pytest.raises(RequestError, match=f"{message}.*; accepted: pairs of a name and a tensor"):
        llm.update_weights(given)
    assert llm.generate({"prompt_token_ids": P(20, 1)}, GREEDY)[0].weight_version == "0"


def test_llm_takes_a_checkpoint_for_its_tensors(tmp_path: Path) -> None:
    """A folder or a file, also in an engine that started without weights; only the tensors count."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((Path(dense(2).model) / "model.safetensors").read_bytes())
    llm = LLM(dense(1).model, plugins=dense(1).plugins, **options(), load_format="dummy")
    for source in (tmp_path, str(tmp_path), weights, dense(2).model):
        llm.update_weights(tensors(dense(1)))
        llm.update_weights(source)
        assert_same(dense(2), P(20, 1), GREEDY, llm.generate({"prompt_token_ids": P(20, 1)}, GREEDY)[0].outputs[0])
    with pytest.raises(CheckpointError, match=r"model '\./nothing': no such file or folder"):
        llm.update_weights("./nothing")
    with pytest.raises(RequestError, match=r"tensors: got ''; accepted: pairs of a name and a tensor.* or a checkpoint"):
        llm.update_weights("")
    weights.write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        llm.update_weights(tmp_path)
    assert_same(dense(2), P(20, 1), GREEDY, llm.generate({"prompt_token_ids": P(20, 1)}, GREEDY)[0].outputs[0])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_requests_sleep_and_go_on(depth: int, params: SamplingParams) -> None:
    subject = dense(1)
    driver = Driver(subject.engine(depth=depth, device="deferred_cpu", rows=2, tokens=24))
    prompts = {"a": P(20, 1), "b": P(33, 2)}
    first_half(driver, params, 4, prompts)
    memory = driver.engine.assembly.arena.tensor
    assert memory.any()
    driver.engine.sleep()
    driver.engine.sleep()
    assert driver.engine.is_sleeping
    assert not memory.any(), "given back"
    driver.add("c", P(20, 1), params)
    driver.add("d", P(9, 4), params)
    driver.engine.abort("d")
    for _ in range(3):
        driver.step()
    assert driver.result("d").finish_reason == "abort"
    assert not driver.is_finished("a")
    driver.engine.wake_up()
    driver.engine.wake_up()
    assert not driver.engine.is_sleeping
    driver.finish()
    for name, prompt in {**prompts, "c": P(20, 1)}.items():
        assert_same(subject, prompt, params, driver.result(name))
    assert driver.final("a").metrics.num_preemptions == 1
    EngineProbe(driver).assert_clean()


def test_restored_memory_is_empty() -> None:
    """The null page must read as zeros, and no page may be found by what it held before."""
    driver = Driver(dense(1).engine())
    driver.add("a", P(40, 1), GREEDY)
    driver.finish()
    driver.engine.sleep()
    driver.engine.wake_up()
    assert not driver.engine.assembly.arena.tensor.any()
    driver.add("b", P(40, 1), GREEDY)
    driver.finish()
    assert driver.final("b").num_cached_tokens == 0
    assert_same(dense(1), P(40, 1), GREEDY, driver.result("b"))


def test_a_sleeping_llm_says_so() -> None:
    llm = dense(1).llm()
    llm.sleep()
    with pytest.raises(RequestError, match="the engine is asleep"):
        llm.generate({"prompt_token_ids": P(20, 1)}, GREEDY)
    llm.wake_up()
    assert_same(dense(1), P(20, 1), GREEDY, llm.generate({"prompt_token_ids": P(20, 1)}, GREEDY)[0].outputs[0])


def test_drain_collects_what_is_in_flight() -> None:
    driver = Driver(dense(1).engine(depth=3, device="deferred_cpu", run_probability=0.0))
    driver.add("a", P(20, 1), GREEDY)
    driver.step()
    driver.step()
    assert (len(driver.engine.tickets), driver.num_tokens("a")) == (2, 0)
    outputs = driver.receive(driver.engine.drain())
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    assert driver.engine.tickets == type(driver.engine.tickets)()
    driver.finish()
    assert_same(dense(1), P(20, 1), GREEDY, driver.result("a"))


def test_expired_requests_are_forgotten() -> None:
    driver = Driver(dense(1).engine())
    driver.add("late", P(20, 1), GREEDY, deadline=1e-6)
    driver.finish(max_steps=5)
    assert driver.result("late").finish_reason == "timeout"
    EngineProbe(driver).assert_clean()


def test_outputs_collected_between_steps_come_once() -> None:
    driver = Driver(dense(1).engine(depth=3, device="deferred_cpu", run_probability=0.0))
    params = GREEDY.model_copy(update={"output_kind": OutputKind.DELTA})
    driver.add("a", P(20, 1), params)
    driver.step()
    driver.step()
    for version in ("x", "y"):
        driver.engine.update_weights(tensors(dense(1)), version)
    driver.engine.sleep()
    driver.engine.wake_up()
    assert driver.engine.has_unfinished()
    driver.finish()
    told = [token for output in driver.outputs["a"] for token in output.outputs[0].token_ids]
    assert told == list(ref(dense(1), P(20, 1), GREEDY).token_ids)
    versions = [output.weight_version for output in driver.outputs["a"]]
    assert versions[:2] == ["0", "0"]
    assert set(versions[2:]) == {"y"}
