"""A tokenizer of bytes: every text round-trips, and a test can write token ids by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from modelrunner.errors import RequestError

PAD, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
NUM_SPECIALS = 4
FIRST_MERGED = FIRST_BYTE + 256


def default_merged(count: int) -> tuple[bytes, ...]:
    """`count` two-letter byte strings: " a", " b", ..., "ea", "eb", ..."""
    pairs = ((left + right).encode() for left, right in product(" etaoin", "abcdefghijklmnopqrstuvwxyz"))
    return tuple(pair for pair, _ in zip(pairs, range(count), strict=False))


class ByteTokenizer:
    """Ids 0 pad, 1 BOS, 2 EOS, 3..258 the bytes (byte + 3), then merged byte strings, then special tokens `<|0|>`, `<|1|>`, ...

    vocab_size: ids in all. merged: byte strings of two bytes or more that have an id of their own; None for two-letter ones that leave
    four ids for special tokens. Encoding takes the longest match at each place, so any text comes back unchanged from `decode`.
    """

    def __init__(self, vocab_size: int = 331, merged: Sequence[bytes] | None = None) -> None:
        room = vocab_size - FIRST_MERGED
        if room < 0:
            raise ValueError(f"vocab_size is {vocab_size}; a byte tokenizer needs at least {FIRST_MERGED} ids")
        self.merged = default_merged(max(room - NUM_SPECIALS, 0)) if merged is None else tuple(merged)
        if len(self.merged) > room:
            raise ValueError(f"{len(self.merged)} merged strings were given; vocab_size {vocab_size} has room for {room}")
        self._vocab_size = vocab_size
        self._bytes: dict[int, bytes] = {FIRST_BYTE + value: bytes([value]) for value in range(256)}
        self._bytes |= {FIRST_MERGED + i: string for i, string in enumerate(self.merged)}
        self._ids = {string: token for token, string in self._bytes.items()}
        self._longest = max(map(len, self._ids))
        first_special = FIRST_MERGED + len(self.merged)
        self._special = {PAD: "<pad>", BOS: "<s>", EOS: "</s>"}
        self._special |= {token: f"<|{token - first_special}|>" for token in range(first_special, vocab_size)}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (EOS,)

    def token_bytes(self) -> list[bytes]:
        """Of each id; special tokens have none."""
        return [self._bytes.get(token, b"") for token in range(self._vocab_size)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data = text.encode()
        ids = [BOS] if add_special_tokens else []
        place = 0
        while place < len(data):
            length = next(n for n in range(self._longest, 0, -1) if data[place : place + n] in self._ids and place + n <= len(data))
            ids.append(self._ids[data[place : place + length]])
            place += length
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD. Raises IndexError for an id outside the vocabulary."""
        data = bytearray()
        for token in map(int, ids):
            if token in self._bytes:
                data += self._bytes[token]
            elif token not in self._special:
                raise IndexError(f"token id {token} is outside the vocabulary of {self._vocab_size} ids")
            elif not skip_special_tokens:
                data += self._special[token].encode()
        return data.decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """`role: content` a line. Raises RequestError for a message without a textual role and content."""
        lines = []
        for i, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise RequestError(f"messages[{i}] has role {role!r} and content {content!r}; both must be text")
            lines.append(f"{role}: {content}\n")
        return self.encode("".join(lines) + ("assistant: " if add_generation_prompt else ""))
