"""What processors of images have in common, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelrunner.checkpoint import ModelCard

IMAGE_FILE, VIDEO_FILE = "preprocessor_config.json", "video_preprocessor_config.json"
MISSING_PILLOW = "images and videos need Pillow ({}): pip install 'modelrunner[multimodal]'"


def file_fields(card: ModelCard, name: str) -> dict[str, Any]:
    """Fields of a processor's file beside the checkpoint; none where there is no such file. Raises ValueError for a damaged one."""
    folder = card.path if card.path.is_dir() else card.path.parent
    path: Path = folder / name
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as a JSON object: {error}") from error
