"""The bytes of ids: joined, those of an encoded text are the text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from modelrunner.errors import RequestError
from modelrunner.plugins.demo_model import demo_file
from modelrunner.plugins.token_bytes import byte_letters, of_slow
from modelrunner.plugins.tokenizers import FastTokenizer, load_gguf

TEXT = 'Grüße, 世界! \n\t{"a": [1, 2]}  😀 end'


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    pieces = [f"<0x{value:02X}>" for value in range(256)] + ["\u2581", "a", "e", "n", "d", "\u2581e", "\u2581en", "nd"]
    vocab = {"<unk>": 0, **{piece: i + 1 for i, piece in enumerate(pieces)}}
    merges = [("\u2581", "e"), ("\u2581e", "n"), ("n", "d")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_bytes_join_to_the_text(make: Any) -> None:
    rust = make()
    rust.add_special_tokens([AddedToken("<end>", special=True)])
    rust.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = FastTokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<end>"))
    tokens = tokenizer.token_bytes()
    assert len(tokens) == tokenizer.vocab_size
    assert b"".join(tokens[item] for item in tokenizer.encode(TEXT, add_special_tokens=False)).decode() == TEXT
    assert tokens[rust.token_to_id("<end>")] == b""
    assert tokens[rust.token_to_id("<think>")] == b"<think>"


@pytest.mark.skipif(demo_file() is None, reason="the demo model is not installed")
def test_bytes_of_a_gguf_file() -> None:
    file = demo_file()
    assert file is not None
    tokenizer = load_gguf(file)
    tokens = tokenizer.token_bytes()  # type: ignore[attr-defined]
    assert b"".join(tokens[item] for item in tokenizer.encode(TEXT, add_special_tokens=False)).decode() == TEXT
    assert all(tokens[item] == b"" for item in tokenizer.eos_token_ids)
    assert len(set(tokens)) > 48000


def test_a_decoder_that_says_nothing_of_bytes_is_refused() -> None:
    rust = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    rust.decoder = decoders.WordPiece()
    tokenizer = FastTokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="[UNK]"))
    with pytest.raises(RequestError, match=r"decoder \(WordPiece\).*accepted: byte-level and sentencepiece"):
        tokenizer.token_bytes()


def test_slow_tokenizers() -> None:
    vocab = {"<s>": 0, "\u2581the": 1, "<0xE2>": 2, "x": 3}
    assert of_slow(vocab, {0: True}, 5) == [b"", b" the", b"\xe2", b"x", b""]
    with pytest.raises(RequestError, match="sentencepiece"):
        of_slow({"a": 0}, {}, 1)


def test_every_byte_has_a_letter() -> None:
    assert sorted(byte_letters().values()) == list(range(256))
