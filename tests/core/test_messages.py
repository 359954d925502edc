"""Messages between a front end and its engine process: what goes in comes out."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from modelrunner.messages import (
    Abort,
    Add,
    Command,
    Done,
    Ended,
    EngineStats,
    Facts,
    Failed,
    Greet,
    Hello,
    Ready,
    Refused,
    Report,
    SentItem,
    SentMedia,
    Sleep,
    Stop,
    TensorEntry,
    Turn,
    UpdateWeights,
    WakeUp,
    decode_command,
    decode_report,
    encode,
)

ITEM = SentItem("image", b"\0key", 2, {"grid": [1, 1, 2], "fps": 2.0}, 1)
COMMANDS: list[Command] = [
    Greet(),
    Add(3, "a", [1, 2, 2**31 - 1], {"temperature": 0.5, "seed": -(2**63), "stop_token_ids": [1]}, -5, 12.5, "salt"),
    Add(5, "b", [1, 330, 330], {}, media=SentMedia("/proc/1/fd/2", [TensorEntry("x", "uint8", [2], 0)], [ITEM], [[1, 2, 0, 0]])),
    Abort(3),
    Abort(3, "stop"),
    UpdateWeights(4, "/proc/1/fd/2", [TensorEntry("a.b", "bfloat16", [2, 3], 64), TensorEntry("c", "float32", [], 128)], "v2"),
    UpdateWeights(5, "some/model"),
    Sleep(6),
    WakeUp(7),
    Stop(),
]
REPORTS: list[Report] = [
    Hello(),
    Ready(331, 256, ["a:b"], [("UserWarning", "text")], ("", "off", 64, "float32", 3)),
    Failed("EngineError", "why"),
    Turn(EngineStats()),
    Turn(
        EngineStats(running=1, finished={"abort": 2}),
        [3, 7],
        [2, 1],
        [5, 6, 7],
        [Facts(3, None, 16, 1, "v2")],
        [Ended(7, "stop", "text"), Ended(3, "stop", 4), Ended(1, "length", None)],
        [Refused(8, "RequestError", "no")],
        [{}, {}],
        [Done(4), Done(5, "CheckpointError", "why")],
    ),
    Turn(EngineStats(sleeping=True, weight_version="v2", weights_problem="a mixture", loaded_tensors=9)),
]


@pytest.mark.parametrize("message", COMMANDS, ids=lambda m: type(m).__name__)
def test_commands_come_through(message: Command) -> None:
    assert decode_command(encode(message)) == message
    with pytest.raises(msgspec.DecodeError):
        decode_report(encode(message))


@pytest.mark.parametrize("message", REPORTS, ids=lambda m: type(m).__name__)
def test_reports_come_through(message: Report) -> None:
    assert decode_report(encode(message)) == message
    with pytest.raises(msgspec.DecodeError):
        decode_command(encode(message))


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=np.float16).reshape(2, 3), np.zeros((0, 4), np.int64), np.eye(3)[::2, ::2].T], ids=str
)
def test_arrays_come_through(array: np.ndarray[Any, Any]) -> None:
    report = decode_report(encode(Turn(EngineStats(), [1], [2], [3, 4], extra=[{"hidden": array}])))
    assert isinstance(report, Turn)
    back = report.extra[0]["hidden"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_logprobs_come_through_by_number() -> None:
    records = np.arange(12, dtype=np.int32).reshape(2, 6)
    report = decode_report(encode(Turn(EngineStats(), [7], [2], [3, 4], logprobs={7: records}, prompt_logprobs={7: records[:1]})))
    assert isinstance(report, Turn)
    np.testing.assert_array_equal(report.logprobs[7], records)
    np.testing.assert_array_equal(report.prompt_logprobs[7], records[:1])


def test_numpy_numbers_become_numbers() -> None:
    command = decode_command(encode(Add(1, "a", [np.int32(5)], {"extra_args": {"scale": np.float32(0.5)}})))  # type: ignore[list-item]
    assert command == Add(1, "a", [5], {"extra_args": {"scale": 0.5}})


@pytest.mark.parametrize("value", [object(), np.array([object()]), lambda: 1])
def test_what_cannot_travel_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be sent to another process; accepted: numbers, text, lists"):
        encode(Add(1, "a", [5], {"extra_args": {"x": value}}))


def test_messages_do_not_share_their_lists() -> None:
    first, second = Turn(EngineStats()), Turn(EngineStats())
    first.tokens.append(1)
    assert second.tokens == []


def test_progress_is_tokens_ends_or_new_weights_but_not_turns() -> None:
    base = EngineStats(computed_tokens=5, generated_tokens=2, finished={"stop": 1})
    still = msgspec.structs.replace(base, turns=9, steps=9, running=3, preemptions=2)
    assert still.progress == base.progress
    for change in ({"computed_tokens": 6}, {"generated_tokens": 3}, {"finished": {"stop": 1, "abort": 1}}, {"loaded_tensors": 1}):
        assert msgspec.structs.replace(base, **change).progress != base.progress
