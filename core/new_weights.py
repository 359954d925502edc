"""Weights for an engine that runs already: tensors, or the name of a checkpoint that has them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from modelrunner.choosing import Chooser
from modelrunner.errors import RequestError, kind_of

if TYPE_CHECKING:
    from modelrunner.checkpoint import CheckpointReader
    from modelrunner.plugin_manager import PluginManager
    from modelrunner.settings import RunnerSettings

Pairs = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
Weights = Pairs | str | os.PathLike[str]
ACCEPTED = "pairs of a name and a tensor, a mapping of names to tensors, or a checkpoint: a folder, a file, or a hub id"


def pairs(tensors: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs, one at a time. Raises RequestError at once for what has none, and later for an item that is not one."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    if isinstance(items, str | bytes | os.PathLike | torch.Tensor) or not isinstance(items, Iterable):
        raise RequestError(f"tensors: got {kind_of(tensors)}; accepted: {ACCEPTED}")
    return map(_checked_pair, items)


def _checked_pair(item: object) -> tuple[str, torch.Tensor]:
    match item:
        case (str(name), torch.Tensor() as tensor):
            return name, tensor
        case (name, other):
            raise RequestError(f"tensors: got the pair of {name!r} and {kind_of(other)}; accepted: {ACCEPTED}")
    raise RequestError(f"tensors: got {kind_of(item)} in place of a pair; accepted: {ACCEPTED}")


def checkpoint_name(named: str | os.PathLike[str]) -> str:
    """The checkpoint's name for another process: absolute if it is a folder or file here. Raises RequestError for an empty one."""
    name = os.fspath(named)
    if not name:
        raise RequestError(f"tensors: got ''; accepted: {ACCEPTED}")
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def checkpoint_tensors(name: str, manager: PluginManager, settings: RunnerSettings) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, found and read as at an engine's start. Nothing else of it counts: the configuration stays.

    An engine that started with `load_format=dummy` reads real ones by what is there. Raises CheckpointError or PluginError.
    """
    choose = Chooser(manager, settings)
    path: Path = choose("model_source", name=name, settings=settings)
    setting = "" if settings.model.load_format == "dummy" else "model.load_format"
    reader: CheckpointReader = choose("checkpoint_readers", setting=setting, path=path)(path, name)
    yield from reader.tensors()


def check_version(version: object) -> None:
    """Raise RequestError unless `version` can name weights, as `Engine.update_weights` does."""
    if version is not None and (not isinstance(version, str) or not version):
        raise RequestError(f"version: got {version!r}; accepted: a string that is not empty, or None")
