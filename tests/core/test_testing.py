"""The helpers that other tests stand on."""

from __future__ import annotations

import pytest
import torch

from modelrunner.errors import RequestError
from modelrunner.testing import BOS, EOS, ByteTokenizer, P, R, by_last, mixed, say
from modelrunner.testing.tiny import DENSE, LOGIT_STD, dense_weights


def test_prompts() -> None:
    assert P(1, 5) == [BOS]
    assert P(4, 1) == [BOS, 34, 41, 48]
    assert max(P(250, 3)) <= 258
    assert R(2) == [BOS, 20, 21, 22, 23, 20, 21, 22, 23]


@pytest.mark.parametrize("text", ["", "plain words", "é😀 €", "the eaten toast", "\x00\x7f", "<s> is text here"])
@pytest.mark.parametrize("merged", [(), None, (b"ab", b"abc", "€".encode())])
def test_byte_tokenizer_gives_every_text_back(text: str, merged: tuple[bytes, ...] | None) -> None:
    tokenizer = ByteTokenizer(merged=merged)
    ids = tokenizer.encode(text)
    assert ids[0] == BOS
    assert all(token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, EOS], skip_special_tokens=False) == f"<s>{text}</s>"


def test_byte_tokenizer_takes_the_longest_match() -> None:
    tokenizer = ByteTokenizer(merged=(b"ab", b"abc"))
    assert tokenizer.encode("abcab", add_special_tokens=False) == [260, 259]
    assert ByteTokenizer(merged=()).encode("a", add_special_tokens=False) == [ord("a") + 3]


def test_byte_tokenizer_refuses_what_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="259"):
        ByteTokenizer(vocab_size=100)
    with pytest.raises(ValueError, match="room for 1"):
        ByteTokenizer(vocab_size=260, merged=(b"ab", b"cd"))
    with pytest.raises(IndexError, match="331"):
        ByteTokenizer().decode([331])
    with pytest.raises(RequestError, match="messages"):
        ByteTokenizer().apply_chat_template([{"role": "user", "content": None}])


def test_say_gives_its_ids_in_order_and_then_ends() -> None:
    script = say([7, 8, 9], prompt_len=4)
    positions = torch.arange(3, 9)
    assert script(positions, torch.zeros(6, dtype=torch.int64)).argmax(-1).tolist() == [7, 8, 9, EOS, EOS, EOS]


def test_mixed_depends_on_position_and_id_and_never_ends() -> None:
    script = mixed()
    positions, ids = torch.cartesian_prod(torch.arange(20), torch.arange(331)).unbind(1)
    tokens = script(positions, ids).argmax(-1).reshape(20, 331)
    assert not {0, 1, EOS} & set(tokens.flatten().tolist())
    assert (tokens[0] != tokens[1]).all()
    assert len(set(tokens[0].tolist())) > 300


def test_by_last_looks_up_the_last_id() -> None:
    table = torch.eye(5)
    assert torch.equal(by_last(table)(torch.zeros(2, dtype=torch.int64), torch.tensor([3, 1])), table[[3, 1]])


def test_the_tiny_head_spreads_logits_as_the_cases_want() -> None:
    weights = dense_weights(DENSE, seed=0)
    hidden = torch.nn.functional.rms_norm(torch.randn(200, 64, generator=torch.Generator().manual_seed(1)), (64,))
    logits = hidden @ weights["lm_head.weight"].T
    assert abs(float(logits.std()) - LOGIT_STD) < 0.3
