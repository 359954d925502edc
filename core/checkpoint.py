"""Checkpoints: what is known of a model before torch is needed (`ModelCard`), and how its tensors are read (`CheckpointReader`).

    reader = SafetensorsReader(Path("model_folder"), "model_folder")
    card = reader.card()                       # no torch yet
    for name, tensor in reader.tensors(): ...  # one CPU tensor at a time

Three readers: a folder of safetensors, one GGUF file, and `dummy`, which has a configuration and no tensors.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelrunner.errors import CheckpointError
from modelrunner.gguf_file import GGUFFile, dequantize

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelCard:
    """What a checkpoint says of itself. Torch-free and frozen; unknown architectures pass through unchanged.

    name: as the user called it. path: folder or file. format: the reader's name, e.g. `safetensors`, `gguf`, `dummy`.
    architectures: transformers class names; of a GGUF file, its own short name until `model_config` has translated it.
    model_type: the family's short name in its configuration.
    config: configuration in the Hugging Face config's names (after the `model_config` hook). metadata: raw GGUF metadata.
    quantization: the checkpoint's own quantisation entry. generation: generation_config.json.
    """

    name: str
    path: Path
    format: str
    architectures: tuple[str, ...]
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # long, and metadata holds the vocabulary: print them by name
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    quantization: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    def with_config(self, config: Mapping[str, Any]) -> ModelCard:
        """This card with the answer of the `model_config` hook: its architectures, model type and quantisation follow the configuration."""
        return replace(
            self,
            config=config,
            architectures=tuple(config.get("architectures") or self.architectures),
            model_type=str(config.get("model_type") or self.model_type),
            quantization=config.get("quantization_config") or self.quantization,
        )


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

    def names(self) -> Iterator[str]:
        """The names of all tensors; a reader that need not read tensors for them does better than this one. Raises as `tensors` does."""
        yield from (name for name, _ in self.tensors())


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError that names the file and says what it is needed for."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; it holds {purpose}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} ({purpose}) cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} ({purpose}) holds a JSON {type(value).__name__}; an object is needed")
    return value


def card_from_config(name: str, path: Path, config_file: Path, checkpoint_format: str) -> ModelCard:
    """The card of a Hugging Face configuration file; generation_config.json beside it is read when present."""
    config = read_json(config_file, "the model's configuration")
    generation_file = config_file.parent / "generation_config.json"
    architectures = config.get("architectures") or ()
    if not isinstance(architectures, list | tuple) or not all(isinstance(entry, str) for entry in architectures):
        raise CheckpointError(f"{config_file}: `architectures` is {architectures!r}; a list of class names is needed")
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        raise CheckpointError(f"{config_file}: `quantization_config` is {quantization!r}; an object is needed, or null")
    return ModelCard(
        name=name,
        path=path,
        format=checkpoint_format,
        architectures=tuple(architectures),
        model_type=str(config.get("model_type") or ""),
        config=config,
        quantization=quantization,
        generation=read_json(generation_file, "defaults for generation") if generation_file.exists() else {},
    )


class SafetensorsReader(CheckpointReader):
    """A Hugging Face folder: config.json and .safetensors files, with or without an index. A file in it stands for its folder."""

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def card(self) -> ModelCard:
        return card_from_config(self.name, self.folder, self.folder / CONFIG, "safetensors")

    def files(self) -> dict[Path, list[str] | None]:
        """Files to read, each with the tensors that the index expects in it (None: whatever it holds)."""
        if self.path.suffix == ".safetensors":
            return {self.path: None}
        index = self.folder / INDEX
        if not index.exists():
            # `consolidated*` are the same weights again under their authors' own names, as Mistral ships them.
            found = [path for path in sorted(self.folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
            if not found:
                there = ", ".join(sorted(path.name for path in self.folder.iterdir())[:10]) or "nothing"
                raise CheckpointError(
                    f"{self.folder} has neither {INDEX} nor a .safetensors file; found: {there}. `load_format=dummy` runs without weights"
                )
            return dict.fromkeys(found)
        weight_map = read_json(index, "which file holds which tensor").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index} has no `weight_map` from tensors to file names, or an empty one")
        shards: dict[Path, list[str] | None] = {}
        for tensor, file in weight_map.items():
            names = shards.setdefault(self.folder / file, [])
            assert names is not None
            names.append(tensor)
        missing = [path.name for path in shards if not path.exists()]
        if missing:
            raise CheckpointError(f"{index} names {len(missing)} of {len(shards)} files that are not there: {', '.join(missing[:10])}")
        return shards

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file, names in self._opened("pt"):
            for name in names:
                yield name, file.get_tensor(name)

    def names(self) -> Iterator[str]:
        """Reads no tensor and does not import torch."""
        for _, names in self._opened("numpy"):
            yield from names

    def _opened(self, framework: str) -> Iterator[tuple[Any, list[str]]]:
        """Each file, open, with the names of its tensors."""
        from safetensors import SafetensorError, safe_open

        for path, expected in self.files().items():
            try:
                with safe_open(path, framework=framework, device="cpu") as file:
                    names = list(file.keys())
                    absent = sorted(set(expected or ()) - set(names))
                    if absent:
                        raise CheckpointError(f"{path} lacks {len(absent)} tensors that {INDEX} expects there: {', '.join(absent[:10])}")
                    yield file, names
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read (damaged or truncated?): {error}") from error


class GGUFReader(CheckpointReader):
    """One GGUF file, or a folder with exactly one. Tensors keep their GGUF names; quantised ones come as float32, one at a time.

    The card's metadata is the file's own, and `gguf.tensor_names`: they say what metadata does not (ties, biases).
    """

    @cached_property
    def file(self) -> GGUFFile:
        if not self.path.is_dir():
            return GGUFFile(self.path)
        found = sorted(self.path.glob("*.gguf"))
        if len(found) != 1:
            raise CheckpointError(f"{self.path} holds {len(found)} .gguf files; name the one to use")
        return GGUFFile(found[0])

    def card(self) -> ModelCard:
        metadata = self.file.metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointError(f"{self.path}: metadata `general.architecture` is {architecture!r}; a name is needed")
        if int(metadata.get("split.count", 1)) > 1:
            raise CheckpointError(
                f"{self.path} is one of {metadata['split.count']} parts; join them first, e.g. with `llama-gguf-split --merge`"
            )
        return ModelCard(
            name=self.name,
            path=self.file.path,
            format="gguf",
            architectures=(architecture,),
            model_type=architecture,
            metadata={**metadata, "gguf.tensor_names": tuple(info.name for info in self.file.tensors)},
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for info in self.file.tensors:
            yield info.name, torch.from_numpy(dequantize(self.file, info))

    def names(self) -> Iterator[str]:
        yield from (info.name for info in self.file.tensors)


class DummyReader(CheckpointReader):
    """A configuration without weights: a folder with config.json, or such a file. The loader then fills the module with seeded noise."""

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG if self.path.is_dir() else self.path

    def card(self) -> ModelCard:
        return card_from_config(self.name, self.path, self.config_file, "dummy")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())
