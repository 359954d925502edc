"""Checkpoint formats: a folder of safetensors, one GGUF file, torch's own files, and `dummy` (a configuration without weights)."""

from __future__ import annotations

from pathlib import Path

from modelrunner.checkpoint import CONFIG, INDEX, CheckpointReader, DummyReader, GGUFReader, SafetensorsReader
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Fit, Offer
from modelrunner.torch_file import TorchReader, torch_files

MODELRUNNER_API = ">=1,<2"

Answer = Offer[type[CheckpointReader]] | Decline


@hookimpl
def checkpoint_readers(path: Path) -> list[Answer]:
    return [safetensors(path), gguf(path), torch_format(path), dummy(path)]


def safetensors(path: Path) -> Answer:
    """Bid for Hugging Face folders.

    It bids (lower) for one without weights too: its reader then says what is missing, and noise runs only when asked for.
    """
    if path.suffix == ".safetensors" or (path.is_dir() and ((path / INDEX).exists() or any(path.glob("*.safetensors")))):
        return Offer("safetensors", lambda: SafetensorsReader, "exact", "safetensors weights")
    if path.name == CONFIG or ((path / CONFIG).exists() and not torch_files(path)):
        return Offer("safetensors", lambda: SafetensorsReader, "family", f"a folder with {CONFIG}, though without .safetensors files")
    return Decline(f"{path} has neither .safetensors files nor {CONFIG}, or torch's own files beside it")


def gguf(path: Path) -> Answer:
    """Bid for GGUF files, and for a folder with exactly one (lower when it holds safetensors too)."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF" or path.suffix == ".gguf":
                return Offer("gguf", lambda: GGUFReader, "exact", "a GGUF file")
        return Decline(f"{path} does not start as a GGUF file")
    found = sorted(path.glob("*.gguf"))
    if not found:
        return Decline(f"{path} holds no .gguf file")
    if len(found) > 1:
        return Decline(f"{path} holds {len(found)} .gguf files; name the one to use, e.g. {found[0]}")
    fit: Fit = "family" if any(path.glob("*.safetensors")) else "exact"
    return Offer("gguf", lambda: GGUFReader, fit, f"the folder's only GGUF file, {found[0].name}")


def torch_format(path: Path) -> Answer:
    """Bid for pytorch_model*.bin and .pt files where there are no safetensors."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.suffix not in (".bin", ".pt"):
        return Decline(f"{path} is no .bin or .pt file")
    if not torch_files(folder) or any(folder.glob("*.safetensors")):
        return Decline(f"{folder} holds no pytorch_model*.bin or .pt file, or safetensors beside it")
    return Offer("torch", lambda: TorchReader, "family", "weights in torch's own format")


def dummy(path: Path) -> Answer:
    """Bid last for anything with a configuration; meant to be asked for by `model.load_format=dummy`."""
    if path.suffix == ".json" or (path / CONFIG).exists():
        return Offer("dummy", lambda: DummyReader, "fallback", "random weights; chosen by load_format=dummy")
    return Decline(f"{path} is neither a .json configuration nor a folder with {CONFIG}")
