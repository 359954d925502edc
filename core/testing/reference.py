"""REF: what a request gives alone in a fresh engine without overlap, chunks or prefix cache; and comparing a result with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from modelrunner.request import CompletionOutput, OutputKind, SamplingParams
from modelrunner.testing.drive import Driver
from modelrunner.testing.subjects import REFERENCE, Subject

NEAR_TIE = 1e-4

_results: dict[tuple[str, tuple[int, ...], str], CompletionOutput] = {}


def ref(subject: Subject, prompt: Sequence[int], params: SamplingParams) -> CompletionOutput:
    """The reference result; computed once per subject, prompt and parameters (the kind of output does not matter)."""
    final = params.model_copy(update={"output_kind": OutputKind.FINAL_ONLY})
    key = (subject.key, tuple(prompt), final.model_dump_json())
    if key not in _results:
        driver = Driver(subject.engine(**REFERENCE))
        driver.add("ref", prompt, final)
        driver.finish()
        _results[key] = driver.result("ref")
        driver.engine.close()
    return _results[key]


@lru_cache(maxsize=4)
def _oracle(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return oracle.eval()


def margins(subject: Subject, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Difference of the two best logits at each output position, by transformers on the same checkpoint, or `subject.logits`."""
    import torch

    with torch.inference_mode():
        ids = [*prompt, *output]
        logits = subject.logits(ids) if subject.logits is not None else _oracle(subject.model)(torch.tensor([ids])).logits[0]
    best = logits[len(prompt) - 1 : -1].topk(2).values
    return [float(gap) for gap in best[:, 0] - best[:, 1]]


def assert_tokens(subject: Subject, prompt: Sequence[int], got: Sequence[int], want: Sequence[int], *, greedy: bool) -> bool:
    """Whether ids are equal. Greedy ones may part where the two best logits are within 1e-4 (then False); else an AssertionError."""
    got, want = list(got), list(want)
    if got == want:
        return True
    first = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    near_tie = greedy and first < min(len(got), len(want)) and margins(subject, prompt, want)[first] < NEAR_TIE
    assert near_tie, f"tokens of prompt {list(prompt)} differ from output {first} on:\n got {got}\nwant {want}"
    return False


def assert_same(subject: Subject, prompt: Sequence[int], params: SamplingParams, result: CompletionOutput) -> None:
    """Ids, text and finish reason equal the reference's, up to a near-tie of a greedy request."""
    want = ref(subject, prompt, params)
    if assert_tokens(subject, prompt, result.token_ids, want.token_ids, greedy=params.temperature == 0):
        assert (result.text, result.finish_reason, result.stop_reason) == (want.text, want.finish_reason, want.stop_reason)
