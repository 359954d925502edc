"""Text is whole characters, pieces join to the whole, and stop strings end where the first of them is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelrunner.testing.byte_tokenizer import BOS, EOS, FIRST_BYTE, ByteTokenizer
from modelrunner.text import MAX_PENDING_TOKENS, REPLACEMENT, Detokenizer, OutputText, StopMatcher, detokenize

BYTES = ByteTokenizer()


def ids_of(data: bytes) -> list[int]:
    return [FIRST_BYTE + value for value in data]


class SpacedTokenizer:
    """Like SentencePiece with byte fallback: 256 byte ids, then words that begin with a space, a special token last.

    Its decoder drops one leading space of the whole, and turns a run of byte ids that is not UTF-8 as a whole into one mark per byte.
    """

    words = (" a", " b", "c", " €", " ")
    eos_token_ids = (256 + len(words),)
    vocab_size = 257 + len(words)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text, run = "", bytearray()
        for token in [*ids, None]:
            if token is not None and token < 256:
                run.append(token)
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += REPLACEMENT * len(run)
            run.clear()
            if token in self.eos_token_ids:
                text += "" if skip_special_tokens else "<e>"
            elif token is not None:
                text += self.words[token - 256]
        return text.removeprefix(" ")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        raise NotImplementedError


SPACED = SpacedTokenizer()


def pieces_of(tokenizer: Any, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    steps = Detokenizer(tokenizer, prompt, skip)
    return [*(steps.feed(token) for token in output), steps.finish()]


EXAMPLES = {
    "plain": (b"Hi ", b"there", "there"),
    "prompt ends inside a character": (b"Hi \xe2\x82", b"\xacx", "€x"),
    "prompt ends inside a character that never comes": (b"Hi \xe2\x82", b"x", "\ufffdx"),
    "characters of two and four bytes": (b"Hi ", "é😀x".encode(), "é😀x"),
    "output ends inside a character": (b"Hi ", b"ab\xf0\x9f", "ab\ufffd"),
    "prompt that spells out a mark": ("Hi \ufffd".encode(), b"x", "x"),
    "context that would begin inside a character": ("😀😀😀".encode(), "€".encode(), "€"),
    "nothing": (b"Hi", b"", ""),
    "no context": (b"", "é".encode(), "é"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_whole_and_pieces_give_the_documented_text(name: str) -> None:
    prompt, output, text = EXAMPLES[name]
    assert "".join(pieces_of(BYTES, ids_of(prompt), ids_of(output))) == text
    assert detokenize(BYTES, ids_of(prompt), ids_of(output)) == text


def test_no_delta_has_a_mark_when_every_character_is_completed() -> None:
    text = "aé😀€x"
    pieces = pieces_of(BYTES, ids_of(b"Hi "), ids_of(text.encode()))
    assert [piece for piece in pieces if piece] == list(text)


def test_a_byte_fallback_prompt_is_not_repeated() -> None:
    """Its decoder spoils the whole run of bytes that the prompt leaves incomplete, complete characters before it included."""
    prompt = [*"é€".encode(), 0xE2, 0x82]
    assert "".join(pieces_of(SPACED, prompt, [0xAC, *"é".encode()])) == "€é"
    assert detokenize(SPACED, prompt, [0xAC, *"é".encode()]) == "€é"


def test_a_leading_space_belongs_to_the_output() -> None:
    space_a, space_b = 256, 257
    assert detokenize(SPACED, [space_a], [space_b]) == " b"
    assert pieces_of(SPACED, [space_a], [space_b, space_a]) == [" b", " a", ""]


def test_special_tokens_are_skipped_or_shown() -> None:
    output = [*ids_of(b"a"), EOS, *ids_of(b"b")]
    assert detokenize(BYTES, [BOS], output) == "ab"
    assert detokenize(BYTES, [BOS], output, skip_special_tokens=False) == "a</s>b"
    assert "".join(pieces_of(BYTES, [BOS], output, skip=False)) == "a</s>b"


@pytest.mark.parametrize("token", [FIRST_BYTE + 0x80, EOS], ids=["invalid byte", "skipped special token"])
def test_the_window_stays_short_when_no_text_comes(token: int) -> None:
    steps = Detokenizer(BYTES, ids_of(b"Hi"))
    text = "".join(steps.feed(token) for _ in range(500))
    assert len(steps._window) <= 2 * MAX_PENDING_TOKENS + 8
    text += "".join(steps.feed(item) for item in ids_of("é".encode())) + steps.finish()
    assert text.endswith("é")
    assert set(text) <= {"é", REPLACEMENT}


utf8_ids = st.text(alphabet="ab é€😀\ufffd", max_size=12).map(lambda text: ids_of(text.encode()))
byte_ids = st.lists(st.sampled_from([*b"ab \xe2\x82\xac\xf0\x9f\x98\x80\xc3\xa9\xff"]).map(lambda value: FIRST_BYTE + value), max_size=24)
noise = st.lists(st.sampled_from([*range(FIRST_BYTE + 0x60, FIRST_BYTE + 0x64), BOS, EOS, 320, 330]), max_size=6)
mixed = st.lists(st.one_of(utf8_ids, byte_ids, noise), max_size=4).map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=150, deadline=None)
@given(prompt=mixed, output=mixed, skip=st.booleans())
def test_pieces_join_to_the_whole(prompt: list[int], output: list[int], skip: bool) -> None:
    assert "".join(pieces_of(BYTES, prompt, output, skip)) == detokenize(BYTES, prompt, output, skip)


spaced_ids = st.lists(
    st.one_of(
        st.sampled_from([*range(256, 257 + len(SpacedTokenizer.words))]).map(lambda token: [token]),
        st.sampled_from(["é", "€", "😀", "a"]).map(lambda text: list(text.encode())),
        st.sampled_from([[0xE2], [0xF0, 0x9F], [0x80], [0xAC]]),
    ),
    max_size=10,
).map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=150, deadline=None)
@given(prompt=spaced_ids, output=spaced_ids, skip=st.booleans())
def test_pieces_join_to_the_whole_with_byte_fallback(prompt: list[int], output: list[int], skip: bool) -> None:
    assert "".join(pieces_of(SPACED, prompt, output, skip)) == detokenize(SPACED, prompt, output, skip)


@settings(max_examples=100, deadline=None)
@given(prompt=utf8_ids, text=st.text(alphabet="ab é€😀", max_size=12))
def test_valid_output_after_a_whole_prompt_is_its_own_text(prompt: list[int], text: str) -> None:
    assert detokenize(BYTES, prompt, ids_of(text.encode())) == text


# ---- stop strings ----------------------------------------------------------------------------------------------------


def feed_all(stops: Sequence[str], pieces: Sequence[str], include: bool = False) -> tuple[str, str | None, int]:
    """(text, stop string, pieces used), checking that nothing given out is withdrawn."""
    matcher = StopMatcher(stops, include)
    text, given_out = "", ""
    for used, piece in enumerate(pieces, 1):
        text += piece
        match = matcher.feed(piece)
        if match is not None:
            text = text[: match.text_length]
            assert text.startswith(given_out)
            return text, match.stop, used
        visible = text[: len(text) - matcher.held()]
        assert visible.startswith(given_out)
        given_out = visible
    return text, None, len(pieces)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "pieces", [list("abc STOP def"), ["ab", "c S", "TO", "P d", "ef"], ["abc STOP def"]], ids=["bytes", "tokens", "one"]
)
def test_a_stop_string_is_found_across_borders(pieces: list[str], include: bool) -> None:
    text, stop, _ = feed_all(["STOP"], pieces, include)
    assert (text, stop) == ("abc STOP" if include else "abc ", "STOP")
    assert feed_all(["STOP", "P d"], pieces, include)[:2] == (text, "STOP")
    assert feed_all(["zzz"], pieces, include) == ("abc STOP def", None, len(pieces))


def test_the_one_that_ends_first_wins_whatever_the_order() -> None:
    for stops in (["cd", "abcde"], ["abcde", "cd"]):
        assert feed_all(stops, ["xabcdef"])[:2] == ("xab", "cd")


def test_of_two_with_one_end_the_longer_wins() -> None:
    for stops in (["TOP", "STOP"], ["STOP", "TOP"]):
        assert feed_all(stops, ["a S", "T", "OP"])[:2] == ("a ", "STOP")


def test_text_that_cannot_become_a_stop_string_is_not_held() -> None:
    matcher = StopMatcher(["aab"])
    held = []
    for letter in "aaaxa":
        assert matcher.feed(letter) is None
        held.append(matcher.held())
    assert held == [1, 2, 2, 0, 1]


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_the_matcher_equals_a_search_of_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    whole = "".join(pieces)
    ends = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    text, found, used = feed_all(stops, pieces, include)
    if not ends:
        assert (text, found) == (whole, None)
        return
    end, _, stop = min(ends)
    assert (text, found) == (whole[: end - (0 if include else len(stop))], stop)
    assert sum(map(len, pieces[: used - 1])) < end <= sum(map(len, pieces[:used]))


# ---- both together -----------------------------------------------------------------------------------------------------


def test_tokens_up_to_the_one_that_completes_the_stop_string_are_kept() -> None:
    output = OutputText(BYTES, [BOS], ("STOP",), include=False, skip_special_tokens=True)
    output.feed(ids_of(b"abc STOP def"))
    assert (output.text, output.num_tokens) == ("abc ", 8)
    output.finish()
    assert (output.text, output.visible) == ("abc ", 4)


def test_nothing_stays_held_at_the_end() -> None:
    output = OutputText(BYTES, [BOS], ("STOP",), include=False, skip_special_tokens=True)
    output.feed(ids_of(b"abc STO"))
    assert output.text[: output.visible] == "abc "
    output.finish()
    assert output.text[: output.visible] == "abc STO"


def test_a_stop_string_completed_by_incomplete_bytes_at_the_end_is_found() -> None:
    output = OutputText(BYTES, [BOS], ("b\ufffd",), include=False, skip_special_tokens=True)
    output.feed(ids_of(b"ab\xf0\x9f"))
    assert output.match is None
    output.finish()
    assert output.text == "a"
