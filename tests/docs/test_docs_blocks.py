"""README and docs say what is true: their code runs, their commands and settings exist, their links lead somewhere.

Fences: `python run` blocks of one page run in order, in one process. `python plugin` blocks load as a plugin. `toml settings` blocks are
settings files. `sh` blocks: `modelrunner` lines are parsed by the real parsers, `make` lines name real targets.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import ModuleType

import pytest

from modelrunner import cli
from modelrunner.plugin_manager import PluginManager
from modelrunner.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHEAP = {"plugins", "settings"}  # commands that are run, not only parsed


@dataclass(frozen=True)
class Block:
    """A fenced block and where it stands."""

    page: Path
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.kind}"


def blocks(kind: str) -> list[Block]:
    return [b for page in PAGES for b in page_blocks(page) if b.kind == kind]


def page_blocks(page: Path) -> list[Block]:
    return [Block(page, kind.strip(), text) for kind, text in FENCE.findall(page.read_text(encoding="utf-8"))]


def shell_lines() -> list[tuple[Path, str]]:
    """Lines of `sh` blocks, without comments."""
    lines = [(block.page, shlex.split(line, comments=True)) for block in blocks("sh") for line in block.text.splitlines()]
    return [(page, shlex.join(words)) for page, words in lines if words]


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", sorted({b.page for b in blocks("python run")}), ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    code = "\n".join(b.text for b in page_blocks(page) if b.kind == "python run")
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("python plugin"), ids=str)
def test_plugin_loads(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "documented_plugin.py"
    path.write_text(block.text, encoding="utf-8")
    manager = PluginManager.load([load(path, "documented_plugin")], {}, discover=False)
    (info,) = manager.describe()
    assert info.state == "loaded"
    assert info.hooks
    assert not manager.failures


@pytest.mark.parametrize("block", blocks("toml settings"), ids=str)
def test_settings_file_is_good(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(block.text, encoding="utf-8")
    load_settings(config_file=path, environ={})


@pytest.mark.parametrize(("page", "line"), [(p, line) for p, line in shell_lines() if "modelrunner " in line and "pip " not in line])
def test_command_is_understood(
    page: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where its own files lie: schemas and grammars are read as the command is understood."""
    words = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith((".schema.json", ".ebnf")):
            Path(word).write_text("{}", encoding="utf-8")
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    assert words.pop(0) == "modelrunner", line
    if "-p" in words:
        del words[words.index("-p") : words.index("-p") + 2]
    if words[0] in CHEAP:
        assert cli.main(words) == 0, capsys.readouterr().err
        return
    command = cli.collect_commands(PluginManager.load())[words[0]]
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    command.add_arguments(parser)
    own, given = cli.split_settings(words[1:], own=parser._option_string_actions) if command.takes_settings else (words[1:], [])
    parser.parse_args(own)
    load_settings(cli.settings_arguments(given), environ={})


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {words[1] for _, line in shell_lines() if (words := line.split())[0] == "make"}
    assert {"demo", "test"} <= asked <= targets


def test_extras_exist() -> None:
    """Ours, or on the page about new plugins those of the project that `new-plugin` makes."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
    template = (ROOT / "plugins/commands/templates/tap/pyproject.toml.tmpl").read_text(encoding="utf-8")
    made = set(tomllib.loads(Template(template).safe_substitute(name="x", module="x"))["project"]["optional-dependencies"])
    for page in PAGES:
        allowed = extras | made if page.name == "new_plugin.md" else extras
        assert set(re.findall(r"\.\[(\w+)\]", page.read_text(encoding="utf-8"))) <= allowed, page


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        prose = re.sub(r"`[^`]*`|^    .*$", "", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_named_files_exist() -> None:
    """Paths in code font, such as `core/engine.py`."""
    path_like = re.compile(r"`((?:core|kernels|model_states|plugins|tests|docs)/[\w/.]*)`")
    named = {path for page in PAGES for path in path_like.findall(page.read_text(encoding="utf-8"))}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_settings_page_is_up_to_date() -> None:
    table = load(Path(__file__).with_name("settings_table.py"), "settings_table")
    text = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert table.page(text) == text, "run python -P tests/docs/settings_table.py"


def test_bootstrap_variables_are_documented() -> None:
    from modelrunner.settings_sources import BOOTSTRAP

    text = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert [name for name in BOOTSTRAP if f"MODELRUNNER_{name}" not in text] == []


def test_no_variable_is_documented_that_is_refused() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    examples = {"MODELRUNNER_SECTION__NAME", "MODELRUNNER_PLUGIN__ACME__DEPTH"}
    for name in set(re.findall(r"\b(MODELRUNNER_[A-Z_]*__[A-Z_]+)\b", text)) - examples:
        load_settings(environ={name: "1"})
