"""Checkpoint formats: a folder of safetensors, one GGUF file, and `dummy` (a configuration without weights)."""

from __future__ import annotations

from pathlib import Path

from modelrunner.checkpoint import CONFIG, INDEX, CheckpointReader, DummyReader, GGUFReader, SafetensorsReader
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Fit, Offer

MODELRUNNER_API = ">=1,<2"

Answer = Offer[type[CheckpointReader]] | Decline


@hookimpl
def checkpoint_readers(path: Path) -> list[Answer]:
    return [safetensors(path), gguf(path), dummy(path)]


def safetensors(path: Path) -> Answer:
    """Bid for Hugging Face folders.

    It bids (lower) for one without weights too: its reader then says what is missing, and noise runs only when asked for.
    """
    if path.suffix == ".safetensors" or (path.is_dir() and ((path / INDEX).exists() or any(path.glob("*.safetensors")))):
        return Offer("safetensors", lambda: SafetensorsReader, "exact", "safetensors weights")
    if path.name == CONFIG or (path / CONFIG).exists():
        return Offer("safetensors", lambda: SafetensorsReader, "family", f"a folder with {CONFIG}, though without .safetensors files")
    return Decline(f"{path} has neither .safetensors files nor {CONFIG}")


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


def dummy(path: Path) -> Answer:
    """Bid last for anything with a configuration; meant to be asked for by `model.load_format=dummy`."""
    if path.suffix == ".json" or (path / CONFIG).exists():
        return Offer("dummy", lambda: DummyReader, "fallback", "random weights; chosen by load_format=dummy")
    return Decline(f"{path} is neither a .json configuration nor a folder with {CONFIG}")
