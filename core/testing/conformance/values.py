"""Work that a GPU could not do without waiting, found on the CPU: reading a tensor's value, shapes that depend on data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from modelrunner.engine import Engine

READERS = ("_local_scalar_dense", "equal", "is_nonzero")
SHAPED_BY_DATA = ("nonzero", "masked_select", "unique_consecutive", "_unique", "_unique2", "unique_dim", "bincount")
HOST_COPIES = ("tolist", "numpy", "cpu", "__array__")
DEVICE_METHODS = ("before_forward", "embed", "positions", "forward", "logits", "encode")


class ValueAsked(AssertionError):
    """A step asked for a value on the device."""


class NoValues(TorchDispatchMode):
    """Raises ValueAsked for an operation that would wait for a GPU.

    Looks into operations made of others: a mode sees those whole in inference mode, where the steps run, e.g. `item`.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in READERS:
            raise ValueAsked(f"aten::{name} reads a tensor's value (.item(), bool(), int(), torch.equal): on a GPU the host waits for it")
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        ranged = name == "histc" and len(args) > 3 and args[2] != args[3]  # else it looks for the least and the greatest value
        uncounted = func is torch.ops.aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if name in SHAPED_BY_DATA or by_mask or uncounted or (name == "histc" and not ranged):
            raise ValueAsked(f"aten::{name}{' with a mask' if by_mask else ''} has a result whose shape depends on data")
        with self:
            made_of_others = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made_of_others is NotImplemented else made_of_others


@contextmanager
def no_host_copies() -> Iterator[None]:
    """Tensor methods that copy to the host raise ValueAsked."""

    def refuse(name: str) -> Callable[..., Any]:
        def raise_(*arguments: Any, **options: Any) -> Any:
            raise ValueAsked(f"Tensor.{name} copies to the host: on a GPU the host waits for it")

        return raise_

    inherited = {name: vars(torch.Tensor).get(name) for name in HOST_COPIES}
    try:
        for name in HOST_COPIES:
            setattr(torch.Tensor, name, refuse(name))
        yield
    finally:
        for name, own in inherited.items():
            if own is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, own)


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which raises ValueAsked where a GPU would make the host wait."""

    def run(*arguments: Any, **options: Any) -> Any:
        with no_host_copies(), NoValues():  # type: ignore[no-untyped-call]
            return method(*arguments, **options)

    return run


def forbid_values(engine: Engine) -> None:
    """From now on the device methods of the engine's ModelState raise ValueAsked where a GPU would make the host wait."""
    state = engine.assembly.state
    for name in DEVICE_METHODS:
        setattr(state, name, guarded(getattr(state, name)))
