"""B24: a prompt that ended inside a character made the first delta repeat the prompt; split characters came out as replacement marks."""

from __future__ import annotations

import pytest

from modelrunner import CompletionOutput, OutputKind, SamplingParams
from modelrunner.testing import BOS, ByteTokenizer, Driver, say, scripted

MARK = "\N{REPLACEMENT CHARACTER}"


def byte_ids(data: bytes) -> list[int]:
    return [byte + 3 for byte in data]


def run(prompt: bytes, output: bytes, kind: OutputKind, max_tokens: int) -> list[CompletionOutput]:
    ids = [BOS, *byte_ids(prompt)]
    subject = scripted(say(byte_ids(output), len(ids)), f"b24-{prompt!r}-{output!r}", tokenizer=ByteTokenizer(merged=()))
    driver = Driver(subject.engine(depth=2))
    driver.add("a", ids, SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=kind))
    driver.finish()
    return [step.outputs[0] for step in driver.outputs["a"]]


def text_of(outputs: list[CompletionOutput], kind: OutputKind) -> str:
    return "".join(output.text for output in outputs) if kind == OutputKind.DELTA else outputs[-1].text


KINDS = pytest.mark.parametrize("kind", list(OutputKind))


@KINDS
def test_a_prompt_that_ends_inside_a_character(kind: OutputKind) -> None:
    """The rule: the character that the output completes counts as output."""
    euro = "€".encode()
    outputs = run(b"Hi " + euro[:2], euro[2:] + b"x", kind, max_tokens=2)
    assert text_of(outputs, kind) == "€x"
    assert all("Hi" not in output.text and MARK not in output.text for output in outputs)


@KINDS
def test_characters_split_over_tokens(kind: OutputKind) -> None:
    wanted = "é😀x"
    outputs = run(b"Hi", wanted.encode(), kind, max_tokens=len(wanted.encode()))
    assert text_of(outputs, kind) == wanted
    assert all(MARK not in output.text for output in outputs)
    ids = [token for output in outputs for token in output.token_ids] if kind == OutputKind.DELTA else list(outputs[-1].token_ids)
    assert ids == byte_ids(wanted.encode())


@KINDS
def test_output_that_ends_inside_a_character(kind: OutputKind) -> None:
    outputs = run(b"Hi", "a😀".encode(), kind, max_tokens=3)
    assert text_of(outputs, kind) == "a" + MARK
    assert all(MARK not in output.text for output in outputs[:-1])
    ids = [token for output in outputs for token in output.token_ids] if kind == OutputKind.DELTA else list(outputs[-1].token_ids)
    assert ids == byte_ids("a😀".encode())[:3]
