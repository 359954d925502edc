"""Checkpoints in torch's own format, in which many draft heads are published: pytorch_model*.bin, or one .pt file."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelrunner.checkpoint import CONFIG, CheckpointReader, ModelCard, card_from_config
from modelrunner.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def torch_files(folder: Path) -> list[Path]:
    """The files with weights: the parts of pytorch_model, else the .pt files."""
    return sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("*.pt"))


class TorchReader(CheckpointReader):
    """A folder with config.json and such files; a file in it stands for its folder.

    Only tensors are read, never code. Files are mapped into memory, so that names cost little.
    """

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def card(self) -> ModelCard:
        return card_from_config(self.name, self.folder, self.folder / CONFIG, "torch")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        files = torch_files(self.folder)
        if not files:
            raise CheckpointError(f"{self.folder} has neither pytorch_model*.bin nor a .pt file")
        for file in files:
            yield from self._opened(file).items()

    def _opened(self, file: Path) -> dict[str, torch.Tensor]:
        """The tensors of a file, mapped into memory unless it is of torch's older kind."""
        import torch

        try:
            try:
                found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:
                found = torch.load(file, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file} cannot be read (damaged, or more than tensors in it?): {str(error).splitlines()[0]}") from error
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise CheckpointError(f"{file} holds a {type(found).__name__}; a dict of names and tensors is needed")
        return found
