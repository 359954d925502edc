"""Checkpoints: what is known of a model before torch is needed (`ModelCard`), and how its tensors are read (`CheckpointReader`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelCard:
    """What a checkpoint says of itself. Torch-free and frozen; unknown architectures pass through unchanged.

    name: as the user called it. path: folder or file. format: the reader's name, e.g. `safetensors`, `gguf`, `dummy`.
    architectures: transformers class names. model_type: the family's short name in its configuration.
    config: configuration in the Hugging Face config's names (after the `model_config` hook). metadata: raw GGUF metadata.
    quantization: the checkpoint's own quantisation entry. generation: generation_config.json.
    """

    name: str
    path: Path
    format: str
    architectures: tuple[str, ...]
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)


class CheckpointReader(ABC):
    """Reads one checkpoint format."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name

    @abstractmethod
    def card(self) -> ModelCard:
        """Read the card; no tensor is read and torch is not imported. Raises CheckpointError with the file and the cause."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, CPU tensor), one at a time. Raises CheckpointError for a missing or truncated file."""
