"""B46: only row 0 read its own state, since a column of a block table was taken for a packed vector.

The operation itself is called with strided and with packed tables in tests/examples/test_recurrent.py."""

from __future__ import annotations

import pytest
from hybrid import hybrid

from modelrunner import SamplingParams
from modelrunner.batch import Plan
from modelrunner.testing import Driver, EngineProbe, P, assert_same
from tests.model_states.drafters.engines import Watch, start
from tests.model_states.drafters.engines import subject as drafted

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("requests", [1, 2, 5])
@pytest.mark.parametrize(("width", "length"), [(1, 9), (4, 50), (15, 235)])
def test_every_row_reads_its_own_state(width: int, length: int, requests: int, drafter: str | None, device: str) -> None:
    """width: pages in the block tables of a step, 16 tokens each; the longest request has `length` prompt tokens."""
    subject = hybrid()
    driver = Driver(subject.engine(rows=5, device=device, prefix=False, drafter=drafter, tokens=1280, captured_tokens=32))
    probe = EngineProbe(driver)
    prompts = [P(max(length - 3 * s, 1), s) for s in range(requests)]
    widths: set[int] = set()

    def listen(plan: Plan) -> bool:
        widths.add(plan.table_pages[1])
        return False

    probe.once("planned", lambda: None, listen)
    for s, prompt in enumerate(prompts):
        driver.add(f"r{s}", prompt, PARAMS)
    driver.finish()
    assert widths == {width}
    for s, prompt in enumerate(prompts):
        assert_same(subject, prompt, PARAMS, driver.result(f"r{s}"))


@pytest.mark.parametrize("requests", [1, 2, 5])
@pytest.mark.parametrize(("width", "length"), [(1, 6), (4, 50), (15, 230)])
@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
def test_every_row_of_a_drafter_reads_its_own_pages(kind: str, width: int, length: int, requests: int, device: str) -> None:
    """Drafts are compared with the oracle's, so keys and values of another row, or of another place, would show."""
    driver = start(kind, rows=5, device=device, prefix=False, more={"graphs": {"eager": True}})
    probe, watch = EngineProbe(driver), Watch.of(driver)
    prompts = [P(max(length - 3 * s, 1), s) for s in range(requests)]
    widths: set[int] = set()

    def listen(plan: Plan) -> bool:
        widths.add(plan.table_pages[0])
        return False

    probe.once("planned", lambda: None, listen)
    for s, prompt in enumerate(prompts):
        driver.add(f"r{s}", prompt, PARAMS)
    driver.finish()
    assert max(widths) == width, "rows end at different times"
    for s, prompt in enumerate(prompts):
        assert_same(drafted(), prompt, PARAMS, driver.result(f"r{s}"))
    assert watch.check_proposals(kind) >= 2 * requests
