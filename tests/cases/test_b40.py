"""B40: encoder output was dropped while something still needed it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mm_world import GREEDY, assert_expected, engine, made
from tiny_mm import PLACEHOLDER, embeddings_of, greedy, weights

from modelrunner.batch import Feature
from modelrunner.testing import EngineProbe

PARTS: Any = (5, (4, 6), 6, (4, 6), 7)
ENDS = (5 + 24, 5 + 24 + 6 + 24)


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("captures", [False, True])
def test_chunk_edges_around_an_image_end(edge: int, depth: int, captures: bool) -> None:
    """An arena for one image; a second request has another one at the same time."""
    driver = engine(arena=24, tokens=ENDS[0] + edge, depth=depth, captures=captures, device_seed=7 * depth + edge)
    one, other = made(PARTS), made((3, (6, 4), 9), 1)
    driver.add("a", one.prompt(), GREEDY)
    driver.add("b", other.prompt(), GREEDY)
    driver.finish()
    assert_expected(one, driver.result("a"))
    assert_expected(other, driver.result("b"))
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_image_is_released_once_committed_tokens_are_past_it(depth: int) -> None:
    driver = engine(arena=24, tokens=8, depth=depth)
    probe = EngineProbe(driver)
    arena = driver.engine.media.arena  # type: ignore[attr-defined]
    driver.add("a", made((5, (4, 6), 60)).prompt(), GREEDY)
    seen = set()
    while driver.engine.has_unfinished():
        driver.step()
        if "a" in driver.engine.requests and probe.row_of("a") >= 0:
            past = probe.committed("a") >= ENDS[0]
            seen.add((past, arena.num_owned))
    assert seen <= {(False, 24), (True, 0)}
    assert (True, 0) in seen
    assert (False, 24) in seen


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("moment", ["planned", "launched", "collected", "committed"])
def test_abort_between_encoding_and_use(depth: int, moment: Any) -> None:
    """The lines of the aborted one go to the other only when no step in flight reads them."""
    for steps in range(1, 7):
        driver = engine(arena=24, tokens=8, depth=depth, device_seed=steps, run_probability=0.3)
        probe = EngineProbe(driver)
        one = made((9, (4, 6), 6), 2)
        driver.add("gone", made(PARTS).prompt(), GREEDY)
        driver.add("stays", one.prompt(), GREEDY)
        for _ in range(steps):
            driver.step()
        probe.once(moment, lambda: driver.engine.abort("gone"))  # noqa: B023
        driver.finish()
        assert_expected(one, driver.result("stays"))
        probe.assert_clean()


def test_aborted_before_it_has_a_row() -> None:
    driver = engine(arena=24, run_probability=0.0)
    driver.add("gone", made(PARTS).prompt(), GREEDY)
    driver.engine.media.advance(driver.engine.scheduler)
    assert driver.engine.media.num_in_flight == 1
    driver.engine.abort("gone")
    one = made((9, (4, 6), 6), 2)
    driver.add("stays", one.prompt(), GREEDY)
    driver.finish()
    assert driver.result("gone").finish_reason == "abort"
    assert_expected(one, driver.result("stays"))
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_media_cache_reset_in_mid_run(depth: int) -> None:
    """After every step once: what a row reads stays, everything else is encoded again."""
    for steps in range(12):
        driver = engine(arena=48, tokens=8, depth=depth, prefix=False, device_seed=steps)
        one, again = made(PARTS), made((3, (4, 6), 9), 1)
        driver.add("a", one.prompt(), GREEDY)
        driver.add("b", again.prompt(), GREEDY)
        for _ in range(steps):
            driver.step()
        driver.engine.reset_media_cache()
        driver.add("c", one.prompt(), GREEDY)
        driver.finish()
        for name, which in (("a", one), ("b", again), ("c", one)):
            assert_expected(which, driver.result(name))
        EngineProbe(driver).assert_clean()


def test_new_weights_are_what_later_images_are_encoded_with() -> None:
    driver = engine(prefix=True)
    one = made(PARTS)
    driver.add("a", one.prompt(), GREEDY)
    driver.finish()
    driver.engine.update_weights(iter(weights(2).items()))
    driver.add("b", one.prompt(), GREEDY)
    driver.finish()
    tokens, gaps = greedy(one.full, one.pictures, seed=2)
    near = next((i for i, gap in enumerate(gaps) if gap < 1e-4), len(tokens))
    assert list(driver.result("b").token_ids)[:near] == tokens[:near]


def test_an_encoder_that_fails_ends_those_who_need_it_alone() -> None:
    driver = engine(arena=300, run_probability=0.1)
    state: Any = driver.engine.assembly.state
    encode = state.encode

    def failing(items: Any, out: Any) -> None:
        if any(item.num_embeddings == 25 for item in items):
            raise MemoryError("planted")
        encode(items, out)

    state.encode = failing
    one = made((9, (4, 6), 6), 2)
    driver.add("bad", made((5, (5, 5), 6)).prompt(), GREEDY)
    driver.step()
    driver.add("good", one.prompt(), GREEDY)
    driver.add("text", made((20,)).prompt(), GREEDY)
    driver.finish()
    assert driver.result("bad").finish_reason == "error"
    assert driver.result("bad").stop_reason == "the encoder failed: MemoryError: planted"
    assert_expected(one, driver.result("good"))
    assert_expected(made((20,)), driver.result("text"))
    EngineProbe(driver).assert_clean()


# ---- with a drafter that looks one token ahead -----------------------------------------------------------------------------


class Seen:
    """What the drafter was given as embedding of the token after each of the step's: by row's tenancy, position -> vector."""

    def __init__(self, driver: Any) -> None:
        self.found: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        drafter: Any = driver.engine.runner.parts.drafter
        embed = drafter._embed

        def watched(batch: Any, ids: torch.Tensor) -> torch.Tensor:
            out = embed(batch, ids)
            if batch.prompts is not None or batch.media is not None:
                for place in torch.nonzero(batch.token_valid).flatten().tolist():
                    row = int(batch.rows[batch.token_row[place]])
                    key = row, int(batch.columns["generation"][row])
                    self.found.setdefault(key, {})[int(batch.positions[place]) + 1] = out[place].clone()
            return out

        drafter._embed = watched


def drafted(**short: Any) -> Any:
    from tests.model_states.drafters.engines import head

    speculation = {"drafter": "eagle", "num_tokens": 3, "model": head("eagle")}
    return engine(24, {"speculation": speculation, "graphs": {"eager": True}}, **short)


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("between", [6, 0])
def test_a_drafter_reads_the_image_too(edge: int, depth: int, between: int) -> None:
    """An arena for one image of the two; a step that ends before an image shows the drafter its first embedding, if it is there already."""
    parts: Any = (5, (4, 6), *([between] if between else []), (4, 6), 7)
    one, other = made(parts), made((3, (6, 4), 9), 1)
    driver = drafted(tokens=ENDS[0] + edge, depth=depth, device_seed=depth, rows=2)
    seen = Seen(driver)
    driver.add("a", one.prompt(), GREEDY)
    driver.add("b", other.prompt(), GREEDY)
    driver.finish()
    assert_expected(one, driver.result("a"))
    assert_expected(other, driver.result("b"))
    table = weights()["model.embed_tokens.weight"]
    for prompt in (one, other):
        vectors = iter(torch.cat([embeddings_of(picture)[:, :64] for picture in prompt.pictures]))
        want = [next(vectors) if token == PLACEHOLDER else table[token] for token in prompt.full]
        (got,) = [found for found in seen.found.values() if len(prompt.full) - 1 in found and shares(found, want)]
        wrong = [place for place in range(1, len(want)) if not torch.allclose(got[place], want[place], atol=1e-5)]
        firsts = [i for i, token in enumerate(prompt.full) if token == PLACEHOLDER and (i % 24 == 5 or prompt.full[i - 1] != PLACEHOLDER)]
        assert set(wrong) <= {*firsts, 5 + 24}, "only the first embedding of an image may be unknown when the step before it runs"
    EngineProbe(driver).assert_clean()


def shares(found: dict[int, torch.Tensor], want: list[torch.Tensor]) -> bool:
    return torch.allclose(found[len(want) - 1], want[-1]) and torch.allclose(found[2], want[2])


@pytest.mark.parametrize("captures", [False, True])
def test_drafts_and_images_in_an_arena_for_one(captures: bool) -> None:
    """Aborted ones, a reset, captured steps: the drafter's part too is of the kind with media."""
    from tests.model_states.drafters.engines import head

    speculation = {"drafter": "eagle", "num_tokens": 3, "model": head("eagle")}
    driver = engine(24, {"speculation": speculation, "graphs": {"bucket_tokens": (8, 16)}}, tokens=13, captures=captures, rows=3)
    many = [made(PARTS, 3), made((3, (6, 4), 9), 1), made((9, (4, 6), 6), 2)]
    for turn in range(3):
        for number, one in enumerate(many):
            driver.add(f"{turn}{number}", one.prompt(), GREEDY)
        driver.add(f"{turn}gone", made(PARTS, 7).prompt(), GREEDY)
        for _ in range(3 + turn):
            driver.step()
        driver.engine.abort(f"{turn}gone")
        driver.engine.reset_media_cache()
        driver.finish()
        for number, one in enumerate(many):
            assert_expected(one, driver.result(f"{turn}{number}"))
    if captures:
        kinds = {
            (key.part, bool(key.features & Feature.MEDIA)) for key in driver.engine.runner.graphs.captured if key.part in ("body", "draft")
        }
        assert kinds == {("body", False), ("body", True), ("draft", False), ("draft", True)}
    EngineProbe(driver).assert_clean()
