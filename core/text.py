"""Text: the tokenizer protocol and detokenising."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer. Thread-safe for reading."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1, added tokens included."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises RequestError when there is no template or it refuses the messages."""
