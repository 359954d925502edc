"""Weights for an engine that runs already: tensors, or the name of a checkpoint that has them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from modelrunner.choosing import Chooser
from modelrunner.errors import RequestError

if TYPE_CHECKING:
    from modelrunner.checkpoint import CheckpointReader
    from modelrunner.plugin_manager import PluginManager
    from modelrunner.settings import RunnerSettings

Weights = Iterable[tuple[str, torch.Tensor]] | str | os.PathLike[str]


def checkpoint_name(named: str | os.PathLike[str]) -> str:
    """The checkpoint's name for another process: absolute if it is a folder or file here. Raises RequestError for an empty one."""
    name = os.fspath(named)
    if not name:
        raise RequestError("tensors: got ''; accepted: pairs of a name and a tensor, or a checkpoint: a folder, a file, or a hub id")
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
