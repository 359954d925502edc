"""B23: a stop string that did not begin and end on token borders was missed, or partly streamed out before it was found."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

from modelrunner import OutputKind, SamplingParams
from modelrunner.testing import ByteTokenizer, Driver, EngineProbe, P, Subject, say, scripted

TEXT = "abc STOP def"
PIECES = [b"ab", b"c S", b"TO", b"P d", b"ef"]
PROMPT = P(4, 1)


def subject(whole_pieces: bool) -> Subject:
    """The output is one byte a token, or five tokens whose borders fall inside the stop string."""
    text = ByteTokenizer(merged=PIECES)
    ids = (
        [text.encode(piece.decode(), add_special_tokens=False)[0] for piece in PIECES]
        if whole_pieces
        else [byte + 3 for byte in TEXT.encode()]
    )
    return scripted(say(ids, len(PROMPT)), f"b23-{whole_pieces}", tokenizer=text)


@dataclass(frozen=True)
class Want:
    text: str
    finish_reason: str
    stop_reason: int | str | None


def run(whole_pieces: bool, kind: OutputKind, **options: object) -> Want:
    driver = Driver(subject(whole_pieces).engine(depth=2))
    driver.add("a", PROMPT, SamplingParams(temperature=0, max_tokens=20, output_kind=kind, **options))
    driver.finish()
    outputs = [output.outputs[0] for output in driver.outputs["a"]]
    EngineProbe(driver).assert_clean()
    if kind == OutputKind.CUMULATIVE:  # no text is ever withdrawn
        texts = [output.text for output in outputs]
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
    text = "".join(output.text for output in outputs) if kind == OutputKind.DELTA else outputs[-1].text
    return Want(text, str(outputs[-1].finish_reason), outputs[-1].stop_reason)


KINDS = pytest.mark.parametrize("kind", list(OutputKind))
PIECE_SIZES = pytest.mark.parametrize("whole_pieces", [False, True], ids=["bytes", "pieces"])


@KINDS
@PIECE_SIZES
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(kind: OutputKind, whole_pieces: bool, include: bool) -> None:
    want = Want("abc STOP" if include else "abc ", "stop", "STOP")
    assert run(whole_pieces, kind, stop=("STOP",), include_stop_str_in_output=include) == want
    assert run(whole_pieces, kind, stop=("P d", "STOP"), include_stop_str_in_output=include) == want, "the one that ends first wins"


@KINDS
@PIECE_SIZES
def test_a_stop_string_that_never_comes_holds_nothing_back(kind: OutputKind, whole_pieces: bool) -> None:
    assert run(whole_pieces, kind, stop=("zzz", "defg")).text == TEXT


@KINDS
@PIECE_SIZES
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_by_id_cuts_no_characters(kind: OutputKind, whole_pieces: bool, include: bool) -> None:
    last = ByteTokenizer(merged=PIECES).encode("ef", add_special_tokens=False)[0] if whole_pieces else ord("f") + 3
    got = run(whole_pieces, kind, stop=("zzz",), stop_token_ids=(last,), include_stop_str_in_output=include)
    assert (got.finish_reason, got.stop_reason) == ("stop", last)
    assert got.text.startswith("abc STOP d")
    assert TEXT.startswith(got.text)
    assert got == run(whole_pieces, OutputKind.FINAL_ONLY, stop=("zzz",), stop_token_ids=(last,), include_stop_str_in_output=include)
    assert got == run(whole_pieces, kind, stop_token_ids=(last,), include_stop_str_in_output=include), (
        "the unrelated stop string changed the text"
    )


@PIECE_SIZES
def test_ids_are_cut_where_the_stop_string_ends(whole_pieces: bool) -> None:
    """Ids, like text and usage, end with the token that completes the stop string; steps in flight add nothing."""
    driver = Driver(subject(whole_pieces).engine(depth=3, device="deferred_cpu", run_probability=0.0))
    driver.add("a", PROMPT, SamplingParams(temperature=0, max_tokens=20, stop=("STOP",)))
    driver.finish()
    assert len(driver.result("a").token_ids) == (4 if whole_pieces else 8)
