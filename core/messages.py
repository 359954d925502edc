"""What a front end and its engine process tell each other: small flat records in msgpack, those of a step in one message.

Commands go to the engine (`Greet`, `Add`, `Abort`, `UpdateWeights`, `Sleep`, `WakeUp`, `Stop`), reports come back (`Hello`, `Ready`,
`Turn`, `Failed`). Requests and changes are named by a number that the front end never gives twice, so a late word about a request that was
given up cannot be taken for one about its successor.
Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

ARRAY = 1  # msgpack's extension code of a numpy array


class _Message(msgspec.Struct, array_like=True, tag=True):
    """Fields travel by position, without their names."""


class Greet(_Message):
    """The first command. Its arrival shows that the engine process is connected."""


class TensorEntry(msgspec.Struct, array_like=True, frozen=True):
    """Where a tensor lies in memory that two processes share. dtype: torch's name, e.g. `bfloat16`. offset: bytes."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


class SentItem(msgspec.Struct, array_like=True):
    """An item of media (see `media.MediaItem`), of whose tensors there are so many."""

    kind: str
    key: bytes
    num_embeddings: int
    info: dict[str, Any]
    num_tensors: int


class SentMedia(msgspec.Struct, array_like=True):
    """A request's media. path, entries: of a `tensor_file.TensorFile` with the tensors of all items. runs: fields of `media.MediaRun`.
    positions: [position_rows, tokens] int32, or None."""

    path: str
    entries: list[TensorEntry]
    items: list[SentItem]
    runs: list[list[int]]
    positions: Any = None
    is_embeds: bool = False


class Add(_Message):
    """Queue a request. prompt: token ids. params: fields of SamplingParams. deadline: on the monotonic clock, which all processes share.
    choice, fork: see `Engine.add_request`. media: of its prompt."""

    number: int
    request_id: str
    prompt: list[int]
    params: dict[str, Any]
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    choice: int = 0
    fork: str | None = None
    media: SentMedia | None = None


class Abort(_Message):
    """End a request now. reason: the finish reason to count it under, such as `stop` when the front end found a stop string."""

    number: int
    reason: str = "abort"


class UpdateWeights(_Message):
    """Replace the weights; answered by `Done`. source: path of a `tensor_file.TensorFile` with `entries`; without, a checkpoint's name."""

    number: int
    source: str
    entries: list[TensorEntry] | None = None
    version: str | None = None


class Sleep(_Message):
    """Give the cache's memory up; answered by `Done`."""

    number: int


class WakeUp(_Message):
    """Take the cache's memory again; answered by `Done`."""

    number: int


class Stop(_Message):
    """End the process. Requests that are still open get no further word."""


class Hello(_Message):
    """The answer to `Greet`: both directions are connected, and the model is about to be loaded."""


class Ready(_Message):
    """The engine takes requests.

    plugins: names of the loaded plugins in loading order. warnings: (category, text) of those that came up while it was assembled.
    media: fields of `media_front.MediaFacts`.
    """

    vocab_size: int
    max_model_len: int
    plugins: list[str]
    warnings: list[tuple[str, str]]
    media: tuple[str, str, int, str, int]


class Facts(_Message):
    """What is known of a request beside its tokens; sent with its first tokens and when it changed. first_token_time: monotonic."""

    number: int
    first_token_time: float | None
    num_cached_tokens: int
    num_preemptions: int
    weight_version: str


class Ended(_Message):
    """A request ended; the tokens of the same message are its last. Drafts as in `CompletionOutput`."""

    number: int
    finish_reason: str
    stop_reason: int | str | None
    num_drafted: int = 0
    num_accepted: int = 0


class Refused(_Message):
    """A request that was not taken, or could not go on. kind: name of the error's class."""

    number: int
    kind: str
    message: str


class Done(_Message):
    """A change was carried out, or was not. kind, message: name of the error's class, empty without one, and what it says."""

    number: int
    kind: str = ""
    message: str = ""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges and counters of an engine process. Counters only rise.

    running: requests with a row. waiting: without one. pages_used, pages_total: of the cache; pages that only the prefix cache keeps are
    not used. turns: of the process's loop. steps: committed. finished: requests by finish reason. Tokens and held rows are counted as in
    `scheduler.Stats`. sleeping: the cache's memory is given up, and requests wait. weight_version: of the weights in use.
    weights_problem: why they cannot be used, so that requests wait; empty when they can. loaded_tensors: of all updates. grammar_ways:
    requests with structured output by the way that they took: "device", or "host: " and the reason.
    weights_problem: why they cannot be used, so that requests wait; empty when they can. loaded_tensors: of all updates.
    drafted_at, accepted_at: drafts checked and kept, by place among those of a request in a step. encoded: images, videos and pieces of
    prompt embeddings that were encoded.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    turns: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = {}
    sleeping: bool = False
    weight_version: str = "0"
    weights_problem: str = ""
    loaded_tensors: int = 0
    held: int = 0
    grammar_ways: dict[str, int] = {}
    drafted_at: list[int] = []
    accepted_at: list[int] = []
    encoded: int = 0

    @property
    def progress(self) -> tuple[int, ...]:
        """Differs from an earlier value exactly if tokens flowed, media were encoded, requests ended or new weights were loaded since."""
        return self.computed_tokens, self.generated_tokens, sum(self.finished.values()), self.loaded_tensors, self.encoded


class Turn(_Message):
    """What a turn of the engine's loop brought, for all requests together.

    numbers, counts: requests with new tokens, and how many each; a turn of several outputs may name one more than once. tokens: all of
    these, one after the other. extra: for each of `numbers`, what its taps report: name -> array, an entry per new token. logprobs: place
    in `numbers` -> [new tokens, words] int32 of the records, for those that ask. prompt_logprobs: request number -> the same of a prompt's
    tokens, once. See `logprobs.PackedLogprobs`.
    """

    stats: EngineStats
    numbers: list[int] = []
    counts: list[int] = []
    tokens: list[int] = []
    facts: list[Facts] = []
    ended: list[Ended] = []
    refused: list[Refused] = []
    extra: list[dict[str, Any]] = []
    done: list[Done] = []
    logprobs: dict[int, Any] = {}
    prompt_logprobs: dict[int, Any] = {}


class Failed(_Message):
    """The engine cannot start, or cannot go on; the process ends. kind: name of the error's class."""

    kind: str
    message: str


Change = UpdateWeights | Sleep | WakeUp
Command = Greet | Add | Abort | Change | Stop
Report = Hello | Ready | Turn | Failed


def _pack(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        head = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(ARRAY, len(head).to_bytes(4, "little") + head + np.ascontiguousarray(value).tobytes())
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process; accepted: numbers, text, lists, mappings, numpy arrays")


def _unpack(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise ValueError(f"msgpack extension {code} is unknown; {ARRAY} is a numpy array")
    end = 4 + int.from_bytes(data[:4], "little")
    dtype, shape = msgspec.msgpack.decode(data[4:end])
    return np.frombuffer(bytes(data[end:]), np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_commands = msgspec.msgpack.Decoder(Command, ext_hook=_unpack)
_reports = msgspec.msgpack.Decoder(Report, ext_hook=_unpack)


def encode(message: Command | Report) -> bytes:
    """Bytes of a message. Raises TypeError for a value that is neither plain data nor a numpy array."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises msgspec.DecodeError for anything but a command."""
    return _commands.decode(data)


def decode_report(data: bytes) -> Report:
    """Raises msgspec.DecodeError for anything but a report."""
    return _reports.decode(data)
