"""The bytes that the ids of a transformers tokenizer stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from modelrunner.errors import RequestError

BYTE = re.compile(r"^<0x([0-9A-F]{2})>$")
BLANK = "\u2581"  # sentencepiece's mark for a space


def of_fast(rust: Any, special: Mapping[int, bool], size: int) -> list[bytes]:
    """rust: a `tokenizers.Tokenizer`. special: of each added id, whether it is a special token, which adds no bytes. size: ids.

    Raises RequestError for a decoder from which bytes do not follow: those of byte-level and of sentencepiece vocabularies will do.
    """
    kinds = set(decoder_kinds(rust))
    if "ByteLevel" in kinds:
        return listed(rust.get_vocab(with_added_tokens=True), special, size, byte_level)
    if kinds & {"ByteFallback", "Metaspace"}:
        return listed(rust.get_vocab(with_added_tokens=True), special, size, sentencepiece)
    raise RequestError(
        f"structured_outputs: the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) does not say which bytes an id stands for; "
        "accepted: byte-level and sentencepiece vocabularies"
    )


def of_slow(vocab: Mapping[str, int], special: Mapping[int, bool], size: int) -> list[bytes]:
    """Of a tokenizer in Python, which must be sentencepiece's. Raises RequestError for others."""
    if not any(text.startswith(BLANK) for text in vocab):
        raise RequestError(
            "structured_outputs: the tokenizer does not say which bytes an id stands for; accepted: sentencepiece vocabularies"
        )
    return listed(vocab, special, size, sentencepiece)


def decoder_kinds(rust: Any) -> Iterator[str]:
    """Names of the decoder and of those that it consists of."""
    if rust.decoder is None:
        return
    pending = [json.loads(rust.decoder.__getstate__())]
    while pending:
        found = pending.pop()
        yield found["type"]
        pending += found.get("decoders", [])


def listed(vocab: Mapping[str, int], special: Mapping[int, bool], size: int, read: Any) -> list[bytes]:
    """Bytes by id. Added tokens stand for their own text."""
    tokens = [b""] * size
    for text, item in vocab.items():
        if item not in special:
            tokens[item] = read(text)
        elif not special[item]:
            tokens[item] = text.encode()
    return tokens


def sentencepiece(text: str) -> bytes:
    found = BYTE.match(text)
    return bytes([int(found[1], 16)]) if found else text.replace(BLANK, " ").encode()


def byte_level(text: str) -> bytes:
    table = byte_letters()
    return bytes(table[letter] for letter in text) if all(letter in table for letter in text) else text.encode()


@lru_cache(maxsize=1)
def byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself where it can be seen, else the next letter from U+0100 on
    (Radford et al. 2019)."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in seen]
    return {chr(value): value for value in seen} | {chr(0x100 + place): value for place, value in enumerate(others)}
