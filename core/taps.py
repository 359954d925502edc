"""Taps: reading and changing hidden states inside a step, for the requests that ask for it.

A plugin answers the hook `taps` with objects of a `Tap` subclass. A request chooses by `SamplingParams.extra_args`, whose keys are the
names of taps. What a tap reports leaves the device beside the step's records and arrives in `CompletionOutput.extra`.

    class Norms(Tap):
        name, points, edits = "norms", ("layer.3",), False
        results = (Result("norms", (), torch.float32),)

        def apply(self, point, hidden, batch):
            self.norm = hidden.index_select(0, batch.sample_index).float().norm(dim=-1)
            return hidden

        def outputs(self, batch):
            return {"norms": self.norm}

A step in which no row asks for a tap does not call it. Dimension letters: T tokens of the step, N its rows, H hidden size. H and D as in
`model_state`: H runs on the host, D enqueues device work and never synchronises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from modelrunner.request_table import Column

if TYPE_CHECKING:
    from modelrunner.batch import Batch
    from modelrunner.checkpoint import ModelCard
    from modelrunner.model_state import StaticBuffer
    from modelrunner.request import Request
    from modelrunner.settings import RunnerSettings

RESULT_DTYPES = (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8)


@dataclass(frozen=True)
class ModelInfo:
    """The model that an engine is about to run, as the hook `taps` is told.

    tap_points: names at which the model can be tapped, empty when it cannot. dtype, device: of hidden states. max_model_len: tokens of
    a request, prompt and output, at most.
    """

    card: ModelCard
    settings: RunnerSettings
    tap_points: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Result:
    """Something reported once per output token: a key of `CompletionOutput.extra`, whose array is [tokens, *shape].

    shape: of one entry; () for a number. dtype: float32, float16, int64, int32 or uint8. ValueError for others and for sizes below 1.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not self.name or self.dtype not in RESULT_DTYPES or any(size < 1 for size in self.shape):
            raise ValueError(
                f"result {self.name!r}: got shape {self.shape} and {self.dtype}; accepted: a name, sizes of at least 1, and one of "
                f"{', '.join(map(str, RESULT_DTYPES))}"
            )


class Tap:
    """Reads or changes hidden states for the requests that ask. One instance per engine; set the attributes in the class or in `__init__`.

    name: the key of `extra_args` by which a request asks. points: tap points at which `apply` is called. results: what `outputs` gives.
    buffers: device tensors that the core allocates before the first step; found as `batch.buffers[name]`.
    edits: whether `apply` changes hidden states. Requests then share cached prefixes only with requests of equal row values.
    """

    name: str = ""
    points: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
    buffers: tuple[StaticBuffer, ...] = ()
    edits: bool = True

    # ---- requests ------------------------------------------------------------------------------------------------

    def columns(self, settings: RunnerSettings) -> Sequence[Column]:
        """H. Request-table columns that this tap owns; the device finds a row's value in `batch.columns[name]` at `batch.rows`.

        A row that does not ask holds each column's default. Beside these, the core keeps the column `tap.<name>`: 1 for rows that ask.
        """
        return ()

    def row_values(self, request: Request) -> Mapping[str, Any] | None:
        """H, at submission. Values of the request's own columns; None if the request does not ask for this tap.

        The request's argument is `request.params.extra_args[self.name]`. Raise ValueError, saying what is accepted, for a wrong one: the
        request is then refused with a RequestError that names the tap.
        """
        return {} if self.name in request.params.extra_args else None

    def cache_key(self, request: Request, values: Mapping[str, Any]) -> bytes | None:
        """H, at submission, for a request that asks. What its cached pages depend on beside tokens and weights; None for nothing.

        values: what `row_values` gave. The default is a digest of them for a tap that `edits`. A tap that must see every prompt token,
        cached or not, gives each request a key of its own: `request.id.encode()`.
        """
        return digest(values) if self.edits else None

    # ---- the step ------------------------------------------------------------------------------------------------

    def apply(self, point: str, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """D. Called at each of `points`, in every step in which some row asks, with the hidden states of all rows.

        hidden: [T, H], not to be changed in place. Returns it, or a new tensor of its shape and dtype. A token's new state may depend on
        its own row only: `batch.token_row` [T] is the row's place in `batch.rows`. Tokens may come in any chunks.
        """
        return hidden

    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """D, after the last layer, in every step in which some row asks: each of `results` by name, [N, *shape].

        Row i goes to the request of `batch.rows[i]` if that row asks and samples in this step, as the entry of the token that it samples;
        `batch.sample_index` [N] is the place in [0, T) of the token it samples from. What `apply` kept on the tap is of the same step.
        """
        return {}

    # ---- for subclasses --------------------------------------------------------------------------------------------

    def asking(self, batch: Batch) -> torch.Tensor:
        """D. [N] bool: the rows that ask for this tap."""
        return self.per_row(batch, f"tap.{self.name}") != 0

    def per_row(self, batch: Batch, column: str) -> torch.Tensor:
        """D. A column's values of the step's rows: [N], or [N, width]; of a seated column, the elements in the row's seat (or defaults)."""
        return batch.per_row(column)

    def per_token(self, batch: Batch, column: str) -> torch.Tensor:
        """D. The same for the step's tokens: [T], or [T, width]."""
        return self.per_row(batch, column).index_select(0, batch.token_row)


def digest(values: Mapping[str, Any]) -> bytes:
    """16 bytes that tell column values apart. values: column name -> number, or array of one dtype."""
    text = blake2b(digest_size=16)
    for name in sorted(values):
        array = np.ascontiguousarray(values[name])
        text.update(f"{name}\0{array.dtype.str}{array.shape}\0".encode() + array.tobytes())
    return text.digest()
