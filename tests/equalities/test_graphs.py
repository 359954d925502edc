"""A captured step is the plain one: tokens with graphs equal those without, at every depth, with arrivals, chunks, preemption and aborts.

On the deferred device a graph is a closure that is made once for a shape and run again, so whatever it kept of the plan it was made for
shows as a wrong token.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from modelrunner import Engine, SamplingParams, Tap, hookimpl
from modelrunner.batch import Batch, Feature, Plan
from modelrunner.graphs import Key, decode_buckets, token_buckets
from modelrunner.step_buffers import Shape
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, assert_same, dense, options, ref, tiny_dense

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=14, ignore_eos=True)
FILTERED = SamplingParams(temperature=0.9, top_p=0.9, top_k=9, seed=6, max_tokens=14, ignore_eos=True)


def start(depth: int, rows: int = 5, pages: int = 24, plugins: Sequence[object] = (), captures: bool = True, **graphs: object) -> Driver:
    settings = options(device="deferred_cpu", depth=depth, rows=rows, tokens=33, pages=pages, page_size=8, captures=captures)
    return Driver(Engine({"model": {"name": str(tiny_dense())}, "graphs": graphs} | settings, plugins=[ByteTokenizerPlugin(), *plugins]))


def count_runs(driver: Driver) -> Counter[Key]:
    """Counts the steps that run as graphs, by key."""
    graphs, counts = driver.engine.runner.graphs, Counter[Key]()
    run = graphs.run

    def counted(key: Key) -> None:
        counts[key] += 1
        run(key)

    graphs.run = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_graphs_change_no_token(depth: int) -> None:
    driver = start(depth)
    counts, probe = count_runs(driver), EngineProbe(driver)
    probe.poison_freed_pages()
    requests = [(P(3 + 7 * k, k % 3), (GREEDY, SAMPLED, FILTERED)[k % 3]) for k in range(9)]
    for k, (prompt, params) in enumerate(requests):
        driver.add(str(k), prompt, params)
        driver.step()
        if k == 5:
            probe.drain()
            probe.preempt(next(name for name in driver.engine.requests if probe.row_of(name) >= 0))
    driver.add("lost", P(40, 1), GREEDY)
    driver.step()
    driver.engine.abort("lost")
    driver.finish()
    requests += [(P(4 + k, k), params) for k, params in enumerate((GREEDY, GREEDY, SAMPLED))]  # kinds alone, in used-up shapes
    for k, (prompt, params) in list(enumerate(requests))[9:]:
        driver.add(str(k), prompt, params)
        driver.finish()
    for k, (prompt, params) in enumerate(requests):
        assert_same(dense(), prompt, params, driver.result(str(k)))
    probe.assert_clean()
    assert len(counts) > 3, "few shapes were met"
    for part in ("step", "tail"):
        kinds = {key.features for key in counts if key.part == part}
        assert kinds == {Feature.GREEDY, Feature.PLAIN, Feature.PLAIN | Feature.FILTERED}, part
    assert {key.size for key in counts if key.part == "body"} >= {16, 32}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("tokens", [(8, 24), (33,)])
def test_one_body_serves_all_mixtures(depth: int, tokens: tuple[int, ...]) -> None:
    """No decode rows, some, chunks of one token, rows that end in flight, steps too large for any body: few shapes, each seen often."""
    driver = start(depth, bucket_tokens=tokens)
    counts, probe = count_runs(driver), EngineProbe(driver)
    probe.poison_freed_pages()
    requests = [(P(1 + 13 * k % 60, k), SamplingParams(temperature=0, max_tokens=1 + 5 * k % 9, ignore_eos=True)) for k in range(16)]
    for k, (prompt, params) in enumerate(requests):
        driver.add(str(k), prompt, params)
        driver.step()
    driver.finish()
    for k, (prompt, params) in enumerate(requests):
        assert_same(dense(), prompt, params, driver.result(str(k)))
    probe.assert_clean()
    bodies = Counter({key.size: count for key, count in counts.items() if key.part == "body"})
    assert bodies.keys() == set(tokens)
    assert bodies.total() >= 4, "bodies must be run again with other rows"


class Nudge(Tap):
    """Adds 0.5 to the hidden states of requests that ask."""

    name = "nudge"
    points = ("layer.1",)

    def apply(self, point: str, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        return hidden + 0.5 * self.per_token(batch, "tap.nudge")[:, None]


class NudgePlugin:
    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def taps(self) -> Sequence[Tap]:
        return [Nudge()]


def test_steps_with_taps_are_no_graphs() -> None:
    """A graph has no taps in it; a step in which one request asks for a tap runs as it is."""
    asking = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, extra_args={"nudge": True})
    told: list[list[list[int]]] = []
    for captures in (False, True):
        driver = start(2, plugins=(NudgePlugin(),), captures=captures)
        for k in range(4):
            driver.add(str(k), P(9 + 7 * k, k), asking if k % 2 else GREEDY)
        driver.finish()
        told.append([list(driver.result(str(k)).token_ids) for k in range(4)])
    assert told[0] == told[1]
    for k in range(4):
        plain = list(ref(dense(), P(9 + 7 * k, k), GREEDY).token_ids)
        assert (told[1][k] == plain) == (k % 2 == 0), "otherwise nothing was tapped, or everybody"


def count_packs(driver: Driver) -> list[tuple[bool, int]]:
    """What is sent from now on: (whether the rows, runs of the patch)."""
    runner, sent = driver.engine.runner, list[tuple[bool, int]]()
    pack = runner._pack

    def counted(plan: Plan, shape: Shape, entry: int, *, rows: bool) -> Callable[[], None]:
        sent.append((rows, plan.patch.dst.size))
        return pack(plan, shape, entry, rows=rows)

    runner._pack = counted  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("captures", [False, True])
def test_a_step_like_the_last_one_sends_its_patch_only(captures: bool) -> None:
    driver = start(2, pages=40, captures=captures)
    requests = [(P(8 + k, k), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)) for k in range(3)]
    for k, (prompt, params) in enumerate(requests):
        driver.add(str(k), prompt, params)
    for _ in range(4):
        driver.step()
    sent = count_packs(driver)
    for _ in range(16):
        driver.step()
    assert sent == [(False, 1)] * 6, "each of three rows fills two pages, at steps of its own"
    driver.add("late", P(5, 9), GREEDY)
    driver.step()
    assert len(sent) > 6
    assert sent[6][0], "who comes is sent with all rows"
    driver.finish()
    for k, (prompt, params) in enumerate(requests):
        assert_same(dense(), prompt, params, driver.result(str(k)))
    assert_same(dense(), P(5, 9), GREEDY, driver.result("late"))


@pytest.mark.parametrize("captures", [False, True])
def test_after_a_failed_launch_the_rows_are_sent_again(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only once the device is done with the buffers of the one that failed."""
    driver = start(2, captures=captures)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    driver.add("a", P(9, 1), params)
    for _ in range(6):
        driver.step()
    device, sent = driver.engine.assembly.device, count_packs(driver)
    launch = device.launch

    def fail(work: object) -> None:
        device.launch = launch  # type: ignore[method-assign]
        raise OSError("planted")

    device.launch = fail  # type: ignore[method-assign]
    done: list[int] = []
    monkeypatch.setattr(type(device), "synchronize", lambda device: done.append(len(sent)))
    with pytest.raises(OSError, match="planted"):
        driver.step()
    monkeypatch.undo()
    driver.step()
    assert done == [0]
    assert sent == [(True, 0)], "the failed step sent nothing, being like the one before"
    driver.finish()
    assert_same(dense(), P(9, 1), params, driver.result("a"))


def test_start_up_captures_and_tells() -> None:
    graphs = start(2, rows=20).engine.assembly.resolved.graphs
    assert graphs.startswith(f"{2 * len(decode_buckets(20))} decode steps and 3 bodies of mixed steps captured in ")
    assert " decode steps and 0 bodies of" in start(2, rows=20, max_tokens=0).engine.assembly.resolved.graphs
    assert start(2, eager=True).engine.assembly.resolved.graphs == "none: graphs.eager is set"
    assert dense().engine().assembly.resolved.graphs == "none: device 'cpu' captures no graphs"


def test_eager_steps_run_no_graph() -> None:
    driver = start(2, eager=True)
    counts = count_runs(driver)
    driver.add("a", P(9, 1), GREEDY)
    driver.finish()
    assert not counts
    assert_same(dense(), P(9, 1), GREEDY, driver.result("a"))


def test_graphs_are_made_again_after_a_sleep() -> None:
    driver = start(2)
    driver.add("a", P(9, 1), GREEDY)
    driver.step_until(lambda: bool(driver.outputs["a"]))
    driver.engine.sleep()
    driver.engine.wake_up()
    assert not driver.engine.runner.graphs._replays
    driver.finish()
    assert driver.engine.runner.graphs._replays
    assert_same(dense(), P(9, 1), GREEDY, driver.result("a"))


@pytest.mark.parametrize("max_tokens", [1, 16, 33, 512, 2048, 8192])
def test_token_buckets_rise_to_the_most_tokens(max_tokens: int) -> None:
    sizes = token_buckets(max_tokens)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_tokens
    assert all(after <= max(1.5 * before, before + 16) for before, after in itertools.pairwise(sizes))
    assert not token_buckets(0)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 20, 64, 100, 256, 1000, 1024])
def test_buckets_rise_to_the_most_rows(max_rows: int) -> None:
    sizes = decode_buckets(max_rows)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_rows
    assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
