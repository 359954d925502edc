"""`modelrunner generate`: what is printed, and what a wrong call says."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import modelrunner.llm
from modelrunner import cli
from modelrunner.checkpoint import ModelCard
from modelrunner.logprobs import Logprob
from modelrunner.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from modelrunner.structured_outputs import StructuredOutputsParams


class FakeLLM:
    """Answers with the prompt in capitals. The last call's arguments stay in `calls`."""

    calls: list[Any] = []  # noqa: RUF012
    generation: dict[str, Any] = {}  # noqa: RUF012
    reason = "length"
    stop_reason: str | None = None
    tokenizer: Any = "some"
    engine = SimpleNamespace(scheduler=SimpleNamespace(stats=SimpleNamespace(steps=9)))

    def __init__(self, model: str = "", *, plugins: Any = (), **settings: Any) -> None:
        self.card = ModelCard("m", Path("m"), "dummy", ("X",), "x", generation=self.generation)
        self.calls[:] = [(model, list(plugins), settings)]

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, prompts: Any, params: SamplingParams) -> list[RequestOutput]:
        self.calls.append(("generate", prompts, params))
        if isinstance(prompts, dict):
            return [self.answer(prompts.get("prompt", "ids"))]
        return [self.answer(prompt if isinstance(prompt, str) else "ids") for prompt in prompts]

    def chat(self, messages: list[list[dict[str, str]]], params: SamplingParams) -> list[RequestOutput]:
        self.calls.append(("chat", messages, params))
        contents: list[Any] = [conversation[0]["content"] for conversation in messages]
        return [self.answer(content if isinstance(content, str) else content[-1]["text"]) for content in contents]

    def answer(self, prompt: str) -> RequestOutput:
        choice = CompletionOutput(0, prompt.upper(), [4, 5], self.reason, self.stop_reason, num_drafted=6, num_accepted=1)
        return RequestOutput("0", prompt, [1, 2], [choice], True, RequestMetrics(1.0, 1.25, 3.00004), num_cached_tokens=1)


@pytest.fixture(autouse=True)
def _fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelrunner.llm, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "generation", {})
    FakeLLM.calls.clear()


def run(*arguments: str) -> int:
    return cli.main(["generate", *arguments])


def test_one_prompt_prints_with_its_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "some/dir", "--prompt", "abc") == 0
    assert capsys.readouterr().out == "abcABC\n"
    assert FakeLLM.calls == [("some/dir", [], {}), ("generate", ["abc"], SamplingParams(max_tokens=64))]


def test_several_prompts_are_labelled_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("from file\nline two\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\r\n".encode())))
    assert run("--prompt", "a", "--prompt-file", str(tmp_path / "p.txt"), "--prompt-file", "-", "--prompt", "z") == 0
    assert FakeLLM.calls[1][1] == ["a", "from file\nline two", "é", "z"]
    assert capsys.readouterr().out.startswith("==> 1 of 4 <==\naA\n\n==> 2 of 4 <==\nfrom file\nline twoFROM FILE")


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--prompt", "é", "--prompt", "b\nc", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rest = {"finish_reason": "length", "stop_reason": None, "num_prompt_tokens": 2, "num_cached_tokens": 1, "num_drafted": 6}
    rest |= {"num_accepted": 1, "num_steps": 9, "seconds": 2.0, "seconds_to_first_token": 0.25}
    assert lines == [{"prompt_token_ids": [1, 2], "token_ids": [4, 5], "text": text, **rest} for text in ("É", "B\nC")]


def test_logprobs_are_shown_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {4: Logprob(-0.5, 1, "x"), 7: Logprob(-math.inf, 2, None)}

    def answer(self: FakeLLM, prompt: str) -> RequestOutput:
        choice = CompletionOutput(0, "t", [4], "length", logprobs=[found], cumulative_logprob=-0.5)
        return RequestOutput("0", prompt, [1, 4], [choice], True, RequestMetrics(0.0), prompt_logprobs=[None, found])

    monkeypatch.setattr(FakeLLM, "answer", answer)
    assert run("--prompt", "a", "--json", "--logprobs", "2", "--prompt-logprobs", "1") == 0
    assert FakeLLM.calls[1][2] == SamplingParams(max_tokens=64, logprobs=2, prompt_logprobs=1)
    line = json.loads(capsys.readouterr().out)
    shown = [
        {"token_id": 4, "token": "x", "logprob": -0.5, "rank": 1},
        {"token_id": 7, "token": None, "logprob": -9999.0, "rank": 2},
    ]
    assert (line["logprobs"], line["prompt_logprobs"], line["cumulative_logprob"]) == ([shown], [None, shown], -0.5)


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_logprobs_without_json_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--prompt", "a", option, "2") == 2
    assert "are shown by --json only" in capsys.readouterr().err
    assert FakeLLM.calls == []


def test_sampling_options_and_settings_go_their_ways() -> None:
    options = ["--max-tokens", "5", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1", "--seed", "3"]
    options += ["--stop", "x", "--stop", "y", "--ignore-eos"]
    assert run("--prompt", "a", *options, "--cache.page_size", "32", "--max-model-len=128", "--enforce-eager") == 0
    [(model, plugins, settings), (_, _, params)] = FakeLLM.calls
    assert (model, plugins) == ("", [])
    assert settings == {"cache.page_size": "32", "max_model_len": "128", "enforce_eager": True}
    assert params == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop=["x", "y"], ignore_eos=True
    )  # fmt: skip


def test_the_checkpoints_defaults_stand_behind_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "generation", {"temperature": 0.6, "top_k": 20})
    run("--prompt", "a", "--temperature", "0")
    assert FakeLLM.calls[1][2] == SamplingParams(max_tokens=64, temperature=0, top_k=20)


def test_chat_makes_a_conversation_of_each_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--prompt", "a", "--prompt", "b", "--chat") == 0
    assert capsys.readouterr().out == "==> a <==\nA\n\n==> b <==\nB\n", "answers do not go on where the prompt ends"
    assert FakeLLM.calls[1][:2] == ("chat", [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]])


def test_token_ids_are_a_prompt_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Their text is not repeated; without a tokenizer the answer is ids as well."""
    assert run("--prompt-ids", "1,2, 3") == 0
    assert capsys.readouterr().out == "IDS\n"
    assert FakeLLM.calls[1][1] == [[1, 2, 3]]
    monkeypatch.setattr(FakeLLM, "tokenizer", None)
    assert run("--prompt-ids", "7", "--skip-tokenizer-init") == 0
    assert capsys.readouterr().out == "4,5\n"
    assert FakeLLM.calls[0][2] == {"skip_tokenizer_init": True}


def test_plugin_modules_reach_the_engine() -> None:
    assert cli.main(["-p", "modelrunner.plugins.tokenizers", "generate", "--prompt", "a"]) == 0
    assert FakeLLM.calls[0][1] == ["modelrunner.plugins.tokenizers"]


WRONG = [
    ([], "no prompt: give --prompt TEXT, --prompt-file FILE (- for standard input) or --prompt-ids IDS"),
    (["--prompt-ids", "1,x"], "'1,x'; accepted: token ids separated by commas"),
    (["--prompt-ids", "1", "--chat"], "a chat template takes text"),
    (["--prompt", "a", "--temperature", "nan"], "temperature: got a number that is not finite"),
    (["--prompt", "a", "--temperature", "-1"], "temperature: got -1.0"),
    (["--prompt", "a", "--max-tokens", "0"], "max_tokens: got 0"),
    (["--prompt", "a", "--max-tokens", "x"], "invalid int value: 'x'"),
    (["--prompt", "a", "--stop", ""], "stop: got"),
    (["--prompt-file", "/no/such/file"], "/no/such/file: No such file or directory"),
    (["--prompt", "a", "--temprature", "1"], "near names are --temperature"),
    (["--prompt", "a", "--prompt", ""], "prompt 2 of 2 is empty"),
    (["--prompt", "a", "--choice", "a", "--regex", "b"], "--choice and --regex together; accepted: one of them"),
    (["--prompt", "a", "--choice", ""], "structured_outputs.choice: it contains ''"),
    (["--prompt", "a", "--json-schema", "/no/schema"], "argument --json-schema: /no/schema: No such file or directory"),
    (["--prompt", "a", "--grammar", "/"], "argument --grammar: /: Is a directory"),
    (["--prompt", "a", "--json-schema", __file__], "test_generate_command.py: not JSON: Extra data: line 1 column 3"),
    (["--prompt", "a", "--num-draft-tokens", "-1"], "num_draft_tokens: got -1"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) or "nothing" for arguments, _ in WRONG])
def test_a_wrong_call_ends_with_2_before_a_model_is_loaded(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert FakeLLM.calls == []


def test_a_file_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p").write_bytes(b"ab\xff")
    assert run("--prompt-file", str(tmp_path / "p")) == 2
    assert "not UTF-8 text (byte 2)" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"\xef\xbb\xbfab\r\n")
    assert run("--prompt-file", str(tmp_path / "p")) == 0
    assert FakeLLM.calls[1][1] == ["ab"]


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run("--prompt-file", "-") == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_text_that_standard_output_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    assert run("--prompt", "é") == 0
    assert out.getvalue() == b"\\xe9\\xc9\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_output_that_ended_in_an_error_shows_in_the_status(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what the error was is told, of each of them."""
    monkeypatch.setattr(FakeLLM, "reason", "error")
    monkeypatch.setattr(FakeLLM, "stop_reason", "the grammar is none")
    assert run("--prompt", "a", "--prompt", "b", *options) == 1
    assert "error: output 2 of 2 ended early: the grammar is none" in capsys.readouterr().err


STRUCTURED = [
    (["--choice", "yes", "--choice", "no"], StructuredOutputsParams(choice=["yes", "no"])),
    (["--regex", "[0-9]+"], StructuredOutputsParams(regex="[0-9]+")),
    (["--json-schema", "schema.json"], StructuredOutputsParams(json={"type": "integer"})),
    (["--grammar", "digits.ebnf"], StructuredOutputsParams(grammar='root ::= [0-9] root | "x"\n')),
    (["--json-object"], StructuredOutputsParams(json_object=True)),
]


@pytest.mark.parametrize(("options", "wanted"), STRUCTURED, ids=[options[0] for options, _ in STRUCTURED])
def test_structured_output(options: list[str], wanted: StructuredOutputsParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    (tmp_path / "digits.ebnf").write_text('root ::= [0-9] root | "x"\n')
    monkeypatch.chdir(tmp_path)
    assert run("--prompt", "a", *options, "--num-draft-tokens", "0") == 0
    assert FakeLLM.calls[1][2] == SamplingParams(max_tokens=64, structured_outputs=wanted, num_draft_tokens=0)


def test_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file each, in their order: beside the prompt, or as parts before the text of a conversation."""
    files = [tmp_path / name for name in ("a.png", "b.png")]
    for file in files:
        file.write_bytes(file.name.encode())
    options = [text for file in files for text in ("--image", str(file))]
    assert run("--prompt", "what?", *options) == 0
    assert FakeLLM.calls[-1][1] == {"prompt": "what?", "multi_modal_data": {"image": [b"a.png", b"b.png"]}}
    assert run("--prompt-ids", "1,2", *options[:2]) == 0
    assert FakeLLM.calls[-1][1] == {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": [b"a.png"]}}
    assert run("--prompt", "what?", "--chat", *options[:2]) == 0
    parts = [{"type": "image", "image": b"a.png"}, {"type": "text", "text": "what?"}]
    assert FakeLLM.calls[-1][1] == [[{"role": "user", "content": parts}]]
    assert "WHAT?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--prompt", "b", "--image", "x.png"], "--image with 2 prompts"),
        (["--prompt", "a", "--image", "no/such.png"], "--image no/such.png: No such file"),
    ],
)
def test_images_that_do_not_fit(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) != 0
    assert message in capsys.readouterr().err
    assert not FakeLLM.calls
