"""From committed tokens to outputs, step by step; requests that neither stream nor have stop strings cost nothing on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from modelrunner.outputs import OutputProcessor
from modelrunner.request import OutputKind, Request, RequestOutput, SamplingParams
from modelrunner.testing.byte_tokenizer import BOS, EOS, ByteTokenizer

TOKENIZER = ByteTokenizer(merged=(b"c S", b"P d"))


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@dataclass
class Committed:
    rows: np.ndarray[Any, Any]
    tokens: np.ndarray[Any, Any]
    num_tokens: np.ndarray[Any, Any]
    finished: list[Request] = field(default_factory=list)


class Rows:
    """A scheduler with rows only: `commit` gives every named request its next tokens, and ends it when told why."""

    def __init__(self, tokenizer: ByteTokenizer | None = TOKENIZER) -> None:
        self.holders: dict[int, Request] = {}
        self.outputs = OutputProcessor(tokenizer, self, clock=lambda: 9.0)
        self.asked = 0

    def request_at(self, row: int) -> Request | None:
        self.asked += 1
        return self.holders.get(row)

    def add(self, request_id: str, *, row: int | None = None, **params: Any) -> Request:
        request = Request(request_id, [BOS, *ids_of("Hi ")], SamplingParams(**params), arrival=1.0, limit=99, seed=0, eos_token_ids=(EOS,))
        if row is not None:
            self.holders[row] = request
            request.row = row
        self.outputs.add(request)
        return request

    def commit(self, tokens: dict[str, list[int]], ends: dict[str, str] | None = None) -> tuple[dict[str, RequestOutput], list[Any]]:
        holders = [(row, request) for row, request in self.holders.items() if request.id in tokens]
        width = max(map(len, tokens.values()), default=1)
        table = np.zeros((len(holders), width), np.int32)
        finished = []
        for at, (row, request) in enumerate(holders):
            new = tokens[request.id]
            table[at, : len(new)] = new
            request.output_token_ids += new
            if ends and request.id in ends:
                del self.holders[row]
                request.row, request.finish_reason = -1, ends[request.id]
                finished.append(request)
        rows = np.array([row for row, _ in holders], np.int32)
        counts = np.array([len(tokens[request.id]) for _, request in holders], np.int32)
        outputs, stopped = self.outputs.process(Committed(rows, table, counts, finished))
        assert len({output.request_id for output in outputs}) == len(outputs)
        return {output.request_id: output for output in outputs}, stopped


def choice(outputs: dict[str, RequestOutput], request_id: str = "a") -> tuple[str, list[int]]:
    return outputs[request_id].outputs[0].text, list(outputs[request_id].outputs[0].token_ids)


def test_cumulative_delta_and_final_outputs() -> None:
    rows = Rows()
    for row, kind in enumerate(OutputKind):
        rows.add(kind.value, row=row, output_kind=kind)
    first, _ = rows.commit(dict.fromkeys(OutputKind, ids_of("a")))
    assert choice(first, "cumulative") == choice(first, "delta") == ("a", ids_of("a"))
    assert "final_only" not in first
    assert not first["delta"].finished
    last, _ = rows.commit(dict.fromkeys(OutputKind, ids_of("b")), dict.fromkeys(OutputKind, "length"))
    assert choice(last, "cumulative") == choice(last, "final_only") == ("ab", ids_of("ab"))
    assert choice(last, "delta") == ("b", ids_of("b"))
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in last.values())
    assert rows.outputs.num_watched == 0


def test_only_watched_rows_are_looked_at() -> None:
    rows = Rows()
    for row in range(8):
        rows.add(str(row), row=row, output_kind="final_only")
    rows.commit({str(row): ids_of("a") for row in range(8)})
    assert (rows.outputs.num_watched, rows.asked) == (0, 0)
    rows.add("watched", row=8)
    rows.commit({name: ids_of("a") for name in [*map(str, range(8)), "watched"]})
    assert rows.asked == 1


@pytest.mark.parametrize("num_waiting", [0, 5], ids=["more rows than watched", "more watched than rows"])
def test_a_request_without_a_row_gets_nothing(num_waiting: int) -> None:
    rows = Rows()
    for i in range(num_waiting):
        rows.add(f"waiting{i}")
    rows.add("other", row=3, output_kind="final_only")
    request = rows.add("a", row=1)
    assert choice(rows.commit({"a": ids_of("x"), "other": ids_of("y")})[0]) == ("x", ids_of("x"))
    del rows.holders[1]
    request.row = -1  # preempted
    assert rows.commit({"other": ids_of("y")})[0] == {}
    request.row = 7
    rows.holders[7] = request
    assert choice(rows.commit({"a": ids_of("z"), "other": ids_of("y")})[0]) == ("xz", ids_of("xz"))


def test_deltas_hold_back_incomplete_characters_but_not_ids() -> None:
    rows = Rows()
    rows.add("a", row=0, output_kind="delta")
    texts, ids = [], []
    for token in ids_of("é€"):
        text, new = choice(rows.commit({"a": [token]})[0])
        texts.append(text)
        ids += new
    assert (texts, ids) == (["", "é", "", "", "€"], ids_of("é€"))


@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_a_running_request(kind: OutputKind, include: bool) -> None:
    rows = Rows()
    request = rows.add("a", row=0, stop="STOP", include_stop_str_in_output=include, output_kind=kind)
    output = ids_of("abc STOP def")
    texts, ids, stopped = [], [], []
    for token in output:
        outputs, stopped = rows.commit({"a": [token]})
        if stopped:
            assert outputs == {}
            break
        if kind is not OutputKind.FINAL_ONLY:
            texts.append(choice(outputs)[0])
            ids.append(choice(outputs)[1])
    [(ended, keep, reason, stop)] = stopped
    assert reason == "stop"
    assert (ended, keep, stop) == (request, 6, "STOP")
    del request.output_token_ids[keep:]
    request.finish_reason, request.stop_reason = "stop", stop
    last = rows.outputs.finish(request).outputs[0]
    text = "".join(texts) + last.text if kind is OutputKind.DELTA else last.text
    got = [token for part in ids for token in part] + list(last.token_ids) if kind is OutputKind.DELTA else list(last.token_ids)
    assert (text, got) == ("abc STOP" if include else "abc ", output[:6])
    if kind is OutputKind.CUMULATIVE:
        assert all(last.text.startswith(text) for text in texts)
    assert (last.finish_reason, last.stop_reason) == ("stop", "STOP")


def test_a_stop_string_in_the_last_tokens_is_the_reason() -> None:
    """The length limit and the stop string come with one step: ids, text and reason are those of the stop string."""
    rows = Rows()
    request = rows.add("a", row=0, stop="STOP", output_kind="final_only")
    outputs, stopped = rows.commit({"a": ids_of("abc STOP def")}, {"a": "length"})
    assert stopped == []
    assert choice(outputs) == ("abc ", ids_of("abc STOP def")[:6])
    assert (request.finish_reason, request.stop_reason) == ("stop", "STOP")
    assert request.output_token_ids == ids_of("abc STOP def")[:6]


@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_nothing_stays_buffered_at_the_end(kind: OutputKind, reason: str) -> None:
    rows = Rows()
    rows.add("a", row=0, stop="zzz", output_kind=kind)
    first, _ = rows.commit({"a": ids_of("abzz")})
    last, _ = rows.commit({"a": ids_of("é")[:1]}, {"a": reason})
    text = choice(last)[0]
    if kind is OutputKind.DELTA:
        text = choice(first)[0] + text
    assert text == "abzz\ufffd"
    assert last["a"].outputs[0].finish_reason == reason


def test_an_aborted_request_reports_once_what_it_has() -> None:
    rows = Rows()
    request = rows.add("a", row=0, output_kind="delta")
    rows.commit({"a": ids_of("ab")})
    request.output_token_ids += ids_of("c")  # committed while the abort was on its way
    request.finish_reason = "abort"
    last = rows.outputs.finish(request)
    assert (last.finished, last.outputs[0].text, last.outputs[0].finish_reason) == (True, "c", "abort")
    assert rows.outputs.num_watched == 0


@pytest.mark.parametrize("kind", list(OutputKind))
def test_without_text_there_are_ids_only(kind: OutputKind) -> None:
    for rows, options in ((Rows(None), {}), (Rows(), {"detokenize": False})):
        rows.add("a", row=0, output_kind=kind, **options)
        assert choice(rows.commit({"a": ids_of("ab")}, {"a": "length"})[0]) == ("", ids_of("ab"))


def test_metrics_and_prompt_go_along() -> None:
    rows = Rows()
    request = rows.add("a", row=0)
    request.first_token_time, request.num_preemptions, request.num_cached_tokens, request.prompt = 2.0, 3, 4, "Hi "
    running = rows.commit({"a": ids_of("a")})[0]["a"]
    assert running.metrics.finished_time is None
    done = rows.commit({"a": ids_of("b")}, {"a": "length"})[0]["a"]
    assert (done.prompt, list(done.prompt_token_ids), done.num_cached_tokens) == ("Hi ", [BOS, *ids_of("Hi ")], 4)
    metrics = done.metrics
    assert (metrics.arrival_time, metrics.first_token_time, metrics.finished_time, metrics.num_preemptions) == (1.0, 2.0, 9.0, 3)


def test_an_output_is_not_changed_by_later_steps() -> None:
    rows = Rows()
    rows.add("a", row=0)
    first = rows.commit({"a": ids_of("a")})[0]
    rows.commit({"a": ids_of("b")})
    assert choice(first) == ("a", ids_of("a"))


class Vectorised(np.ndarray[Any, Any]):
    """An array that cannot be gone through one by one."""

    def tolist(self) -> Any:
        raise AssertionError("work for every row of the step")

    __iter__ = tolist  # type: ignore[assignment]


@pytest.mark.parametrize("high", [False, True])
def test_one_watched_request_costs_no_work_for_every_row(high: bool) -> None:
    """Rows in any order, and after a step with more of them, whose places must not be taken for this one's."""
    rows = Rows()
    request = rows.add("a", row=900 if high else 3, output_kind="delta")
    for order in (np.arange(1000)[::-1], np.array([7, 900, 3, 5]), np.array([901, 5])):
        tokens = np.array([ids_of(letter) for letter in "abcd"], np.int32)
        table = np.resize(tokens, (len(order), 1))
        committed = Committed(order.astype(np.int32).view(Vectorised), table, np.ones(len(order), np.int32))
        outputs, _ = rows.outputs.process(committed)
        places = np.flatnonzero(order == request.row)
        assert [choice({"a": output}) for output in outputs] == [("abcd"[at % 4], ids_of("abcd"[at % 4])) for at in places]
        request.output_token_ids += [token for output in outputs for token in output.outputs[0].token_ids]
    assert len(request.output_token_ids) == 2


@pytest.mark.parametrize("kind", list(OutputKind))
def test_a_caller_cannot_change_the_engines_prompt(kind: OutputKind) -> None:
    """The ids in an output were the engine's own list."""
    rows = Rows()
    request = rows.add("a", row=0, output_kind=kind)
    prompt = list(request.prompt_token_ids)
    outputs = [*rows.commit({"a": ids_of("a")})[0].values(), *rows.commit({"a": ids_of("b")}, {"a": "length"})[0].values()]
    for output in outputs:
        assert output.prompt_token_ids == tuple(prompt)
        with pytest.raises(TypeError):
            output.prompt_token_ids[0] = 9  # type: ignore[index]
    assert len({id(output.prompt_token_ids) for output in outputs}) == 1, "one copy for all outputs of a request"
