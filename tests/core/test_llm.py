"""LLM: every result, in the prompts' order, call after call, and an engine that stays usable. The engine here answers with the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import modelrunner.llm
from modelrunner.checkpoint import ModelCard
from modelrunner.errors import RequestError
from modelrunner.llm import LLM
from modelrunner.media_front import MediaFacts, MediaFront
from modelrunner.outputs import OutputProcessor
from modelrunner.request import OutputKind, Request, RequestOutput, SamplingParams, make_request
from modelrunner.settings import MediaSettings
from modelrunner.testing.byte_tokenizer import ByteTokenizer

TEXT_ONLY = MediaFront(MediaSettings(), MediaFacts("the model takes text only", "off", 0, "float32"), lambda: None)  # type: ignore[arg-type]


class EchoEngine:
    """Repeats the first prompt id, one token a step, until max_tokens. `fails_at`: the step that raises, once."""

    is_sleeping = False

    def __init__(self, settings: Mapping[str, Any], *, plugins: Sequence[object] = ()) -> None:
        self.arguments, self.plugins = dict(settings), plugins
        self.tokenizer: ByteTokenizer | None = ByteTokenizer()
        self.card = ModelCard("m", Path("m"), "dummy", ("X",), "x", generation={"temperature": 0.25})
        self.requests: dict[str, Request] = {}
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self.outputs = OutputProcessor(self.tokenizer, self)
        self.fails_at: dict[int, BaseException] = {}
        self.steps = 0
        self.closed = False
        self.assembly = SimpleNamespace(media=SimpleNamespace(front=TEXT_ONLY))

    def request_at(self, row: int) -> None:
        return None

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams | None = None, **options: Any) -> None:
        assert request_id not in self.requests
        request = make_request(
            request_id, prompt, params, card=self.card, tokenizer=self.tokenizer, vocab_size=331, max_model_len=64,
            seed=0, now=0.0, **options,
        )  # fmt: skip
        self.requests[request_id] = request
        self.seen.append(request)

    def abort(self, request_id: str) -> None:
        if request_id in self.requests:
            self.aborted.append(request_id)
            self.requests[request_id].finish_reason = "abort"

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        if self.steps in self.fails_at:
            raise self.fails_at[self.steps]
        ended = []
        for request in list(self.requests.values()):
            if request.finish_reason is None:
                request.output_token_ids.append(request.prompt_token_ids[0])
                if len(request.output_token_ids) == request.params.max_tokens:
                    request.finish_reason = "length"
            if request.finish_reason is not None:
                ended.append(self.outputs.finish(self.requests.pop(request.id)))
        return ended

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(modelrunner.llm, "Engine", EchoEngine)
    return LLM("some/model", max_model_len=64)


def engine_of(llm: LLM) -> EchoEngine:
    engine: Any = llm.engine
    return engine


def test_settings_go_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelrunner.llm, "Engine", EchoEngine)
    plugin = object()
    engine = engine_of(LLM("m", plugins=[plugin], max_model_len=8, cache={"page_size": 4}))
    assert engine.arguments == {"model": "m", "max_model_len": 8, "cache": {"page_size": 4}}
    assert engine.plugins == [plugin]
    assert engine_of(LLM()).arguments == {}, "the model's name may come from the environment or a file"


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    for _ in range(2):  # call after call
        lengths = [10, 3, 7, 1]
        outputs = llm.generate([[5 + i] for i in range(4)], [SamplingParams(max_tokens=n) for n in lengths])
        assert [list(output.outputs[0].token_ids) for output in outputs] == [[5 + i] * n for i, n in enumerate(lengths)]
        assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    same = llm.generate(["ab"] * 5, SamplingParams(max_tokens=2))
    assert len({output.outputs[0].text for output in same}) == 1
    assert len({output.request_id for output in same}) == 5
    assert not engine_of(llm).requests


PROMPT_FORMS = [
    ("ab", [[1, 100, 101]]),
    (["ab", "c"], [[1, 100, 101], [1, 102]]),
    ([5, 6], [[5, 6]]),
    (np.array([5, 6]), [[5, 6]]),
    (range(5, 7), [[5, 6]]),
    ([[5, 6], [7]], [[5, 6], [7]]),
    (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    ({"prompt": "ab"}, [[1, 100, 101]]),
    ([{"prompt_token_ids": [5]}, "c", [7]], [[5], [1, 102], [7]]),
    ([], []),
]


@pytest.mark.parametrize(("prompts", "ids"), PROMPT_FORMS, ids=[str(form).replace("\n", "") for form, _ in PROMPT_FORMS])
def test_one_prompt_or_a_list_of_them(llm: LLM, prompts: Any, ids: list[list[int]]) -> None:
    assert [list(output.prompt_token_ids) for output in llm.generate(prompts, SamplingParams(max_tokens=1))] == ids


def test_options_reach_the_requests(llm: LLM) -> None:
    llm.generate([{"prompt": "a", "cache_salt": "s"}, "b"], priority=[3, 4], deadline=9.0)
    assert [(request.priority, request.deadline, request.cache_salt) for request in engine_of(llm).seen] == [(3, 9.0, "s"), (4, 9.0, None)]
    llm.generate(["a", "b"], deadline=[None, 2.0])
    assert [request.deadline for request in engine_of(llm).seen[2:]] == [None, 2.0]


def test_default_parameters_are_the_checkpoints_and_only_the_end_is_reported(llm: LLM) -> None:
    llm.generate("a")
    llm.generate("a", SamplingParams(output_kind="delta"))
    first, second = (request.params for request in engine_of(llm).seen)
    assert (first.temperature, first.output_kind) == (0.25, OutputKind.FINAL_ONLY)
    assert (second.temperature, second.output_kind) == (1.0, OutputKind.FINAL_ONLY)
    assert llm.default_sampling_params() == SamplingParams(temperature=0.25)


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"prompts": ["a", "b", []]}, r"prompts\[2\]: prompt: it is empty"),
    ({"prompts": ["a", [5, 999]]}, r"prompts\[1\]: prompt token ids: got 999 at position 1"),
    ({"prompts": 5}, "prompts: got an int"),
    ({"prompts": b"a"}, "prompts: got a bytes"),
    ({"prompts": np.array(5)}, "prompts: got a ndarray"),
    ({"prompts": None}, "prompts: got a NoneType"),
    ({"prompts": {"a", "b"}}, "prompts: got a set"),  # whose order would be nobody's
    ({"prompts": ["a", "b"], "sampling_params": [SamplingParams()]}, "sampling_params: got a list of 1 for 2 prompts"),
    ({"prompts": ["a"], "sampling_params": {"temperature": 1}}, "sampling_params: got a dict"),
    ({"prompts": ["a"], "priority": [1, 2]}, "priority: got a list of 2 for 1 prompts"),
    ({"prompts": ["a", "b"], "deadline": [1.0, -1.0]}, r"prompts\[1\]: deadline: got -1"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=[message[:40] for _, message in BAD_CALLS])
def test_a_bad_call_raises_before_anything_runs(llm: LLM, call: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(**call)
    assert all(not request.output_token_ids for request in engine_of(llm).seen)
    assert not engine_of(llm).requests
    assert llm.generate("a", SamplingParams(max_tokens=1))[0].finished


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")], ids=["interrupt", "error"])
def test_an_exception_ends_the_rest_of_the_call_only(llm: LLM, error: BaseException) -> None:
    engine = engine_of(llm)
    engine.fails_at[2] = error
    with pytest.raises(type(error)):
        llm.generate(["a", "b", "c"], [SamplingParams(max_tokens=n) for n in (1, 5, 6)])
    assert engine.aborted == ["1", "2"], "the first one had finished"
    assert not engine.requests
    again = llm.generate("a", SamplingParams(max_tokens=2))
    assert [output.outputs[0].finish_reason for output in again] == ["length"]


def test_an_engine_that_cannot_go_on_shows_its_first_error(llm: LLM) -> None:
    engine_of(llm).fails_at = {step: RuntimeError(f"step {step}") for step in range(1, 9)}
    with pytest.raises(RuntimeError, match="step 1"):
        llm.generate(["a", "b"])


def test_chat_applies_the_template(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    tokenizer = ByteTokenizer()
    [output] = llm.chat(one, SamplingParams(max_tokens=1))
    assert list(output.prompt_token_ids) == tokenizer.encode("user: hi\nassistant: ")
    outputs = llm.chat([one, one], SamplingParams(max_tokens=1), add_generation_prompt=False)
    assert [list(output.prompt_token_ids) for output in outputs] == [tokenizer.encode("user: hi\n")] * 2
    with pytest.raises(RequestError, match=r"prompts\[1\]: messages\[0\] has role None"):
        llm.chat([one, [{"content": "x"}]])
    with pytest.raises(RequestError, match="messages: got a str"):
        llm.chat("hi")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="messages: got an empty list"):
        llm.chat([])
    with pytest.raises(RequestError, match="messages: got an int"):
        llm.chat(3)  # type: ignore[arg-type]


def test_contents_of_text_parts_are_joined(llm: LLM) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    [output] = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
    assert list(output.prompt_token_ids) == ByteTokenizer().encode("user: hi\nassistant: ")
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]: got a part of type 'image_url'; the model takes text only"):
        llm.chat([{"role": "user", "content": [parts[0], picture]}])
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]: got a part 'hi'"):
        llm.chat([{"role": "user", "content": ["hi"]}])


def test_ids_only_without_a_tokenizer(llm: LLM) -> None:
    engine = engine_of(llm)
    engine.tokenizer = None
    engine.outputs = OutputProcessor(None, engine)
    [output] = llm.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=2))
    assert (output.outputs[0].text, list(output.outputs[0].token_ids)) == ("", [5, 5])
    with pytest.raises(RequestError, match=r"prompts\[0\]: prompt: got text, and there is no tokenizer"):
        llm.generate("a")
    with pytest.raises(RequestError, match="a chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_the_progress_bar_is_for_terminals(llm: LLM, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SamplingParams(max_tokens=1))
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False)
    assert capfd.readouterr().err == ""
    llm.generate(["a", "b"], SamplingParams(max_tokens=1))
    assert "2/2" in capfd.readouterr().err


def test_the_engine_is_closed_at_the_end(llm: LLM) -> None:
    with llm as same:
        assert same is llm
    assert engine_of(llm).closed
