"""Rows with structured output that draft: their tokens are those of rows that do not, whatever is proposed, in every schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from draft_world import PATTERNS, drawn
from grammar_world import TablePlugin, written

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.request import Request, Status
from modelrunner.testing import Driver, EngineProbe, P, ScriptDrafterPlugin, Subject, constant, dense, scripted
from modelrunner.testing.byte_tokenizer import EOS, FIRST_BYTE
from tests.kernels.chi_square import assert_fits

LETTERS = 'root ::= ([a-e]{3, 14} ("x" | "yé"))'
PAIRS = r'root ::= ("{" pair ("," pair){0, 3} "}")' + "\n" + r'pair ::= ("\"" [a-e]{1, 3} "\":" ("1" | "22" | "true" | "null"))'
TEXTS = ["another thing", "one thing", "one", "xyz é"]
RULES: list[dict[str, Any]] = [{"grammar": LETTERS}, {"choice": TEXTS}, {"grammar": PAIRS}]
LARGE = {"choice": ["a text of more states than there is room for, " * 8]}  # so the host follows it
STATES = 300
IDS = {letter: FIRST_BYTE + ord(letter) for letter in "abcdexy"}
MORE: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"top_p": 0.8, "top_k": 9, "min_p": 0.01},
    {"logit_bias": {IDS["b"]: 3.0, IDS["x"]: -2.0}},
    {"min_tokens": 4},
    {"bad_words": ["a", "bc"]},
    {"allowed_token_ids": [*IDS.values(), EOS]},  # which contradicts most
    {"max_tokens": 3},
    {"stop": ["c"], "include_stop_str_in_output": True},
    {"num_draft_tokens": 1},
]
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SHORT: list[Any] = [
    {"depth": 1, "prefix": False, "chunked": False},
    {"depth": 2, "device": "deferred_cpu"},
    {"depth": 3, "device": "deferred_cpu", "tokens": 24, "device_seed": 5},
    {"depth": 2, "device": "deferred_cpu", "captures": True, "rows": 5, "pages": 24, "page_size": 4, "tokens": 32},
    *(pytest.param({"depth": depth, "device": "cuda", "rows": 16, "tokens": 48}, marks=NEEDS_GPU) for depth in (1, 3)),
]


def asked() -> list[tuple[str, list[int], SamplingParams]]:
    """Requests with automata of each kind, with masks of the host, and with no grammar."""
    found = []
    for i, more in enumerate(MORE):
        for j in range(2):
            drawing = {"temperature": 1.0, "seed": i} if (i + j) % 3 else {"temperature": 0.0}
            rule = StructuredOutputsParams(**RULES[(i + j) % len(RULES)])
            params = SamplingParams(structured_outputs=rule, **({"max_tokens": 40} | drawing | more))
            found.append((f"{i}-{j}", P(5 + (7 * i + 11 * j) % 40, i), params))
        found.append((f"plain-{i}", P(9 + i, i), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    host = StructuredOutputsParams(**LARGE)
    found += [(f"host-{i}", P(8 + i, i), SamplingParams(temperature=i, seed=i, max_tokens=30, structured_outputs=host)) for i in range(2)]
    return found


def run(plugins: Sequence[object], monkeypatch: pytest.MonkeyPatch, **short: Any) -> tuple[Driver, dict[str, Any]]:
    monkeypatch.setenv("MODELRUNNER_GRAMMAR__AUTOMATON_STATES", str(STATES))
    monkeypatch.setenv("MODELRUNNER_MODEL__DTYPE", "float32")
    subject = Subject(dense().model, "tables", (*dense().plugins, TablePlugin(), *plugins))
    driver = Driver(subject.engine(**short))
    for name, prompt, params in asked():
        driver.add(name, prompt, params)
    driver.finish()
    found = {}
    for name, _, _ in asked():
        result = driver.result(name)
        tops = None if result.logprobs is None else [sorted(each) for each in result.logprobs]
        found[name] = (list(result.token_ids), result.finish_reason, result.stop_reason, result.text, tops)
    EngineProbe(driver).assert_clean()
    return driver, found


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """What comes without a drafter."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run((), monkeypatch)[1]


def proposing(pattern: str, plain: dict[str, Any]) -> ScriptDrafterPlugin:
    """Proposes what comes without a drafter where the pattern says so, elsewhere a token that often leads nowhere in the grammar."""
    says = {tuple(prompt): plain[name][0] for name, prompt, _ in asked()}

    def script(request: Request) -> list[int]:
        own = says[tuple(request.prompt_token_ids)]
        drafts = [token if PATTERNS[pattern](place) else (token + 1) % 331 for place, token in enumerate(own)]
        return [*drafts, EOS, *drafts] if pattern == "right" else drafts  # and beyond the end

    return ScriptDrafterPlugin(script, turns=(3, 2, 3, 1))


@pytest.mark.parametrize("short", SHORT, ids=lambda short: "-".join(f"{name}={value}" for name, value in short.items()))
@pytest.mark.parametrize("pattern", ["right", "every other", "wrong"])
def test_tokens_are_those_without_a_drafter(
    pattern: str, short: dict[str, Any], plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, found = run((proposing(pattern, plain),), monkeypatch, drafter="script", **short)
    assert found == plain
    assert {reason for _, reason, *_ in found.values()} >= {"stop", "length", "error"}
    counts = {name: (driver.result(name).num_drafted, driver.result(name).num_accepted) for name in found}
    drafted, accepted = (sum(count[k] for name, count in counts.items() if name[0].isdigit()) for k in (0, 1))
    assert drafted > 50
    share = accepted / drafted
    assert {"right": share > 0.6, "every other": 0 < share < 0.5, "wrong": share == 0}[pattern], share
    assert all(counts[name] == (0, 0) for name in found if name.startswith("host")), "their masks are made a token at a time"
    ways = driver.engine.guides.ways
    assert ways["device"] == 2 * len(MORE)
    assert ways.total() == ways["device"] + 2
    if short.get("pages"):
        assert driver.engine.scheduler.stats.preemptions, "nobody gave way"


@pytest.mark.parametrize("drafter", ["ngram", "script"])
def test_the_state_follows_what_is_kept(drafter: str, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted and aborted in mid-text, with steps in flight."""
    subject = Subject(dense().model, "tables", (*dense().plugins, TablePlugin(), proposing("every other", plain)))
    driver = Driver(subject.engine(depth=3, device="deferred_cpu", device_seed=3, drafter=drafter, rows=6, pages=60))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    chosen = [(name, prompt, params) for name, prompt, params in asked() if len(plain[name][0]) > 8 and name[0].isdigit()][:5]
    for name, prompt, params in chosen:
        driver.add(name, prompt, params)
    for tokens in (2, 4):
        for name, *_ in chosen[:3]:
            driver.step_until(lambda name=name, tokens=tokens: driver.num_tokens(name) >= tokens)
            probe.drain()
            if not driver.is_finished(name) and driver.engine.requests[name].status is Status.RUNNING:
                probe.preempt(name)
    driver.step_until(lambda: driver.num_tokens(chosen[-1][0]) >= 1)
    driver.engine.abort(chosen[-1][0])
    driver.finish()
    assert probe.counters().preemptions >= 3
    for name, *_ in chosen:
        assert list(driver.result(name).token_ids) == plain[name][0] or name == chosen[-1][0]
    probe.assert_clean()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_forced_text_takes_few_steps(depth: int) -> None:
    """Each step brings 1 + k tokens of it."""
    params = SamplingParams(temperature=1, seed=1, max_tokens=100, structured_outputs=StructuredOutputsParams(choice=["abcdefghij" * 4]))
    ids: list[int] = []
    plugins = (*dense().plugins, TablePlugin(), ScriptDrafterPlugin(lambda request: ids))
    steps = []
    for drafter in ("", "script"):
        driver = Driver(Subject(dense().model, "tables", plugins).engine(depth=depth, drafter=drafter or None, drafts=4, pages=64))
        driver.add("a", P(9, 1), params)
        driver.finish()
        ids[:] = ids or driver.result("a").token_ids
        assert list(driver.result("a").token_ids) == ids
        assert driver.result("a").finish_reason == "stop"
        steps.append(driver.engine.scheduler.stats.steps)
    assert len(ids) <= steps[0]
    assert steps[1] <= len(ids) / 5 + 2 + depth


CHANCES = {"a": 0.35, "b": 0.25, "c": 0.2, "d": 0.15, "e": 0.05}
WORDS = ["aabab", "aabba", "aacde", "abab", "abcd", "baaa", "babb", "bcdea", "bcedd", "cadab"]  # none is how another begins


def joint() -> torch.Tensor:
    """How often each of `WORDS` comes: letter by letter, each drawn among those that can still lead to one."""
    found = []
    for word in WORDS:
        chance = 1.0
        for place, letter in enumerate(word):
            possible = {other[place] for other in WORDS if other[:place] == word[:place]}
            chance *= CHANCES[letter] / sum(CHANCES[each] for each in possible)
        found.append(chance)
    return torch.tensor(found)


PROPOSED: dict[str, Callable[[Subject], Subject]] = {
    "drawing": lambda subject: drawn({IDS["a"]: 0.4, IDS["b"]: 0.1, IDS["c"]: 0.1, IDS["d"]: 0.2, IDS["y"]: 0.2}, subject),
    "script": lambda subject: Subject(
        subject.model, "certain", (*subject.plugins, ScriptDrafterPlugin(lambda request: [IDS["a"], IDS["b"], IDS["c"], IDS["d"]]))
    ),
}


@pytest.mark.parametrize("device", ["deferred_cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("drafter", sorted(PROPOSED))
def test_what_is_drawn_follows_the_masked_distribution(drafter: str, device: str) -> None:
    logits = torch.full((331,), -1e4)
    logits[[IDS.get(letter, FIRST_BYTE + ord(letter)) for letter in CHANCES]] = torch.tensor(list(CHANCES.values())).log()
    subject = scripted(constant(logits), "letters")
    subject = PROPOSED[drafter](Subject(subject.model, subject.key, (*subject.plugins, TablePlugin())))
    driver = Driver(subject.engine(device=device, rows=128, tokens=1024, drafter=drafter, drafts=3, prefix=False))
    words = StructuredOutputsParams(choice=WORDS)
    for i in range(8):
        driver.add(str(i), P(6, i), SamplingParams(temperature=1.0, seed=i, max_tokens=9, n=300, structured_outputs=words))
    driver.finish()
    texts = [written(choice.token_ids) for i in range(8) for choice in driver.final(str(i)).outputs]
    counts = torch.tensor([texts.count(word) for word in WORDS])
    assert counts.sum() == 2400
    assert_fits(counts, joint() * 2400)
    stats = driver.engine.scheduler.stats
    assert 0 < stats.num_accepted < stats.num_drafted
    EngineProbe(driver).assert_clean()
