"""Telling published draft heads apart by their configuration, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_eagle3(config: Mapping[str, Any], architecture: str) -> bool:
    """Whether a configuration is that of an EAGLE-3 head: it says so, or has a vocabulary of its own for drafts."""
    named = f"{architecture} {config.get('speculators_model_type', '')}".lower().replace("-", "")
    return "eagle3" in named or "draft_vocab_size" in config
