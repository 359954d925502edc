"""Every hook has a page with its exact signature and a working example, and a test here that runs that example in an engine.

The tests are called `test_<hook>`; a hook without one, or without its page, fails `test_every_hook_has_a_page_and_a_test`.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from grammar_world import written
from signatures import signature

from modelrunner import LLM, SamplingParams, StructuredOutputsParams, hookimpl
from modelrunner.cli import collect_commands
from modelrunner.hookspecs import HookSpecs
from modelrunner.plugin_contract import HOOKS, hook_arguments
from modelrunner.plugin_manager import PluginManager
from modelrunner.settings import load_settings, merge_sections
from modelrunner.testing import dense

DOCS = Path(__file__).resolve().parents[2] / "docs"
PARTS = ("**When it fires.**", "**Arguments.**", "**Answer.**", "## Example")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], list(range(10, 33))]


def block(text: str, kind: str) -> str:
    found = re.search(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found.group(1) if found else ""


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Loads the example of a hook's page as a module of its own."""

    def load(hook: str) -> ModuleType:
        path = tmp_path / f"example_of_{hook}.py"
        path.write_text(block((DOCS / f"hooks/{hook}.md").read_text(encoding="utf-8"), "python plugin"), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module

    return load


def llm(*plugins: object, model: str | None = None, tokenizer: bool = True, **settings: Any) -> LLM:
    """The tiny Llama, or `model`, on the CPU."""
    subject = dense()
    given: dict[str, Any] = {"cache": {"num_pages": 64}, "max_model_len": 64, "dtype": "float32"} | settings
    own = subject.plugins if tokenizer else ()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*max_model_len.*")
        return LLM(subject.model if model is None else model, plugins=[*own, *plugins], **{"device": "cpu"} | given)


def tokens(*plugins: object, **settings: Any) -> list[tuple[int, ...]]:
    with llm(*plugins, **settings) as engine:
        return [tuple(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    """Tokens without any example."""
    return tokens()


# ---- one test a hook -------------------------------------------------------------------------------------------------


def test_settings_sections(example: Callable[[str], ModuleType]) -> None:
    module = example("settings_sections")
    sections = merge_sections(PluginManager.load([module]).collect("settings_sections"))
    settings = load_settings({"plugin.greeter.times": 3}, sections=sections, environ={})
    assert settings.section(module.GreeterSettings).times == 3


def test_cli_commands(example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    manager = PluginManager.load([example("cli_commands")])
    command = collect_commands(manager)["who-answers"]
    assert command.run(argparse.Namespace(hook="device"), manager) == 0
    assert capsys.readouterr().out == "modelrunner:devices\n"


def test_model_source(example: Callable[[str], ModuleType], plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(dense().model, tmp_path / "models/tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tokens(example("model_source"), model="shelf:tiny") == plain


def test_checkpoint_readers(example: Callable[[str], ModuleType], plain: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = Path(dense().model)
    shutil.copy(folder / "config.json", tmp_path)
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "weights.pt")
    assert tokens(example("checkpoint_readers"), model=str(tmp_path)) == plain


def test_model_config(example: Callable[[str], ModuleType], plain: Any, tmp_path: Path) -> None:
    module = example("model_config")
    shutil.copytree(dense().model, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    shorter = {long: short for short, long in module.NAMES.items()}
    renamed = {shorter.get(name, name): value for name, value in config.items() if name != "architectures"}
    assert set(module.NAMES) <= set(renamed)
    (tmp_path / "m/config.json").write_text(json.dumps(renamed | {"model_type": "short-names"}))
    assert tokens(module, model=str(tmp_path / "m")) == plain


def test_tokenizer(example: Callable[[str], ModuleType]) -> None:
    with llm(example("tokenizer"), tokenizer=False) as engine:
        (output,) = engine.generate("Hello", GREEDY)
        assert list(output.prompt_token_ids) == [8, 5, 12, 12, 15]
        assert engine.tokenizer is not None
        assert output.outputs[0].text == engine.tokenizer.decode(output.outputs[0].token_ids)


def test_model_state(example: Callable[[str], ModuleType], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["CounterForCausalLM"], "vocab_size": 50}))
    with llm(example("model_state"), model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True) as engine:
        outputs = engine.generate([[3], [7, 1, 48]], GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [[4, 5, 6, 7, 8, 9], [49, 0, 1, 2, 3, 4]]


def test_device(example: Callable[[str], ModuleType], plain: Any) -> None:
    with llm(example("device"), device="counted_cpu") as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [tuple(output.outputs[0].token_ids) for output in outputs] == plain
        device: Any = engine.engine.assembly.device
        assert device.name == "counted_cpu"
        assert device.launched >= GREEDY.max_tokens  # type: ignore[operator]


def test_taps(example: Callable[[str], ModuleType], plain: Any) -> None:
    with llm(example("taps")) as engine:
        asked, silent = engine.generate(PROMPTS, [GREEDY.model_copy(update={"extra_args": {"length": True}}), GREEDY])
    assert [tuple(output.outputs[0].token_ids) for output in (asked, silent)] == plain
    assert asked.outputs[0].extra["length"].shape == (6,)
    assert (asked.outputs[0].extra["length"] > 0).all()
    assert silent.outputs[0].extra == {}


def test_logits_processors(example: Callable[[str], ModuleType], plain: Any) -> None:
    """Where the plain output says a token twice running, the second one is another."""
    again = GREEDY.model_copy(update={"logit_bias": {77: 100.0}})
    with llm(example("logits_processors")) as engine:
        asked, silent, echoing = engine.generate(
            [PROMPTS[0], PROMPTS[1], PROMPTS[0]], [again.model_copy(update={"logits_processors": ["no_echo"]}), GREEDY, again]
        )
    assert tuple(silent.outputs[0].token_ids) == plain[1]
    assert list(echoing.outputs[0].token_ids) == [77] * 6
    tokens = list(asked.outputs[0].token_ids)
    assert tokens[::2] == [77] * 3
    assert 77 not in tokens[1::2]


def test_attention_backend(example: Callable[[str], ModuleType], plain: Any) -> None:
    module = example("attention_backend")
    with llm(module, pin={"attention_backend": "textbook"}) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        backends = {type(bound.backend).__name__ for bound in bound_attention(engine)}
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == plain
    assert backends == {"Textbook"}


def bound_attention(engine: LLM) -> Sequence[Any]:
    """What layers call, from a step of the engine."""
    seen: list[Any] = []
    state = engine.engine.assembly.state
    forward = state.forward
    state.forward = lambda hidden, positions, attention, caches, tap: (  # type: ignore[method-assign]
        seen.extend(attention.values()),
        forward(hidden, positions, attention, caches, tap),
    )[1]
    engine.generate([1, 2, 3], GREEDY)
    return seen


def test_kernels(example: Callable[[str], ModuleType], plain: Any) -> None:
    module = example("kernels")
    with llm(module) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert "override of" in engine.engine.runner.parts.ops.explain()["silu_mul"]
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == plain


def test_drafter(example: Callable[[str], ModuleType], plain: Any) -> None:
    with llm(example("drafter"), speculation={"drafter": "last_token", "num_tokens": 2}) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == plain
    assert all(output.outputs[0].num_drafted >= 2 for output in outputs)


def test_linear_scheme(example: Callable[[str], ModuleType]) -> None:
    import torch

    with llm(example("linear_scheme"), linear={"scheme": "half"}) as engine:
        (output,) = engine.generate([PROMPTS[0]], GREEDY)
        stored = dict(engine.engine.assembly.state.module.named_buffers())
    assert {buffer.dtype for name, buffer in stored.items() if name.endswith("qweight")} == {torch.float16}
    assert len(output.outputs[0].token_ids) == 6


def test_grammar_backend(example: Callable[[str], ModuleType]) -> None:
    four = StructuredOutputsParams(regex="[0-9]{4}")
    params = [SamplingParams(temperature=1, seed=i, structured_outputs=asked) for i, asked in enumerate([four, None, four])]
    with llm(example("grammar_backend")) as engine:
        first, _, last = engine.generate([PROMPTS[0]] * 3, params)
        (other,) = engine.generate([PROMPTS[0]], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    for output in (first, last):
        assert re.fullmatch("[0-9]{4}", written(output.outputs[0].token_ids))
        assert output.outputs[0].finish_reason == "stop"
    assert other.outputs[0].stop_reason == "structured_outputs.regex: only [0-9]{n} is understood"


def test_observer(example: Callable[[str], ModuleType]) -> None:
    module = example("observer")
    assert module.tally.tokens == 0
    tokens(module)
    assert module.tally.tokens == 12
    assert module.tally.seconds > 0


# ---- the guard ---------------------------------------------------------------------------------------------------------


def page_problems(hook: str, text: str) -> list[str]:
    """What the page of `hook` lacks."""
    problems = [f"lacks {part!r}" for part in (f"# {hook}\n", *PARTS) if part not in text]
    want = hook + signature(getattr(HookSpecs, hook), drop_self=True)
    if block(text, "python signature").strip() != want:
        problems.append(f"has another signature than {want}")
    problems += [f"does not explain the argument {name}" for name in hook_arguments(hook) if f"| `{name}` | " not in text]
    if f"@hookimpl\ndef {hook}(" not in block(text, "python plugin"):
        problems.append("has no example that implements the hook")
    return problems


def problems_of(hooks: Sequence[str], pages: Mapping[str, str], tests: Mapping[str, Any]) -> list[str]:
    """Everything that is missing, over all hooks."""
    found = [f"docs/hooks/{hook}.md {problem}" for hook in hooks for problem in page_problems(hook, pages.get(hook, ""))]
    found += [f"hook {hook} lacks a test test_{hook}" for hook in hooks if not callable(tests.get(f"test_{hook}"))]
    found += [f"hook {hook} is not listed in docs/hooks/index.md" for hook in hooks if f"| [{hook}]({hook}.md) | " not in pages["index"]]
    return found + [f"docs/hooks/{name}.md is about no hook" for name in pages if name not in (*hooks, "index")]


def documented() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "hooks").glob("*.md")}


def test_every_hook_has_a_page_and_a_test() -> None:
    assert problems_of(list(HOOKS), documented(), globals()) == []


def test_a_hook_without_page_or_test_is_found() -> None:
    """Also a page that has fallen behind the hook."""
    pages = documented()
    without = {name: text for name, text in pages.items() if name != "taps"}
    assert "docs/hooks/taps.md lacks '# taps\\n'" in problems_of(list(HOOKS), without, globals())
    untested = {name: value for name, value in globals().items() if name != "test_device"}
    assert problems_of(list(HOOKS), pages, untested) == ["hook device lacks a test test_device"]
    stale = pages | {"device": pages["device"].replace("settings: RunnerSettings", "options: RunnerSettings")}
    (problem,) = problems_of(list(HOOKS), stale, globals())
    assert "has another signature than device(settings: RunnerSettings)" in problem
    assert problems_of([h for h in HOOKS if h != "taps"], pages, globals()) == ["docs/hooks/taps.md is about no hook"]


def test_the_index_has_the_order_of_a_start() -> None:
    """One plugin that implements all hooks notes who is asked."""
    asked: list[str] = []

    def noting(hook: str) -> Any:
        def implementation(self: object) -> None:
            asked.append(hook)

        return hookimpl(implementation, specname=hook)

    spy = type("Spy", (), {hook: noting(hook) for hook in HOOKS})()
    with llm(spy, speculation={"drafter": "ngram"}):
        pass
    order = list(dict.fromkeys(asked))
    assert order == [hook for hook in HOOKS if hook != "cli_commands"]
    listed = re.findall(r"^\| \[(\w+)\]", documented()["index"], re.MULTILINE)
    assert listed == list(HOOKS)


def test_examples_take_only_arguments_that_hooks_have(example: Callable[[str], ModuleType]) -> None:
    for hook in HOOKS:
        taken = set(inspect.signature(getattr(example(hook), hook)).parameters)
        assert taken <= set(hook_arguments(hook))
