"""`modelrunner new-plugin NAME --kind KIND`: write a package that installs, runs and passes its own tests, to be changed into yours.

A kind is a folder of `templates/`: every file in it is written, without its `.tmpl`, with `$words` filled in and `PACKAGE` in its path
replaced by the module's name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from modelrunner.checkpoint import ModelCard
from modelrunner.cli import Command
from modelrunner.errors import PluginError
from modelrunner.hookspecs import API_VERSION
from modelrunner.offers import Decline
from modelrunner.plugin_manager import PluginManager
from modelrunner.settings import load_settings

KINDS: Mapping[str, str] = {
    "model-state": "A model family for modelrunner.",
    "logits-processor": "A logits processor for modelrunner: the newest tokens of a request become less likely.",
    "drafter": "A drafter for modelrunner's speculative decoding: what followed the newest token the last time.",
    "observer": "An observer of modelrunner's steps and requests.",
    "tap": "Taps for modelrunner: a layer's hidden states, read and changed.",
}
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
SUFFIX = ".tmpl"
MUST_EQUAL = "It must equal the entry of `architectures` in config.json, upper and lower case too"


def command() -> Command:
    return Command("new-plugin", "write a new plugin package, with its tests, to start from", add_arguments, run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the plugin, e.g. orchid; its package is then modelrunner-orchid")
    parser.add_argument("--kind", required=True, choices=list(KINDS), help="what the plugin supplies")
    parser.add_argument(
        "--architecture",
        metavar="NAME",
        default="",
        help="model-state: the entry of `architectures` in config.json to bid for, case counting; guessed from NAME by default",
    )
    parser.add_argument(
        "--into", metavar="FOLDER", type=Path, default=Path(), help="folder to write modelrunner-NAME into; here by default"
    )


def run(args: argparse.Namespace, manager: PluginManager) -> int:
    """Write the package and say what to do next. Raises PluginError, and leaves nothing behind, for a name or a folder that is taken."""
    words = words_for(args.name, args.kind, manager, args.architecture)
    folder = Path(args.into) / words["distribution"]
    write(folder, render(args.kind, words))
    print(f"{folder}:")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"  {path.relative_to(folder)}")
    if args.kind == "model-state" and not args.architecture:
        print(f"\n{words['architecture']} is a guess. {MUST_EQUAL}:")
        print(f"set ARCHITECTURES in {words['module']}/__init__.py and its name in the tests, or write it anew with --architecture.")
    for bidder in bidders(words["architecture"], manager) if args.kind == "model-state" else ():
        print(f"\n{words['architecture']} is run by {bidder} too: while both are installed, choose one with pin.model_state={args.name}.")
    print(f"\nNext, in {folder}:\n  pip install -e '.[test]'\n  pytest\n  modelrunner plugins")
    return 0


def bidders(architecture: str, manager: PluginManager) -> list[str]:
    """The plugins that say they accept the architecture: they decline another one, and name theirs."""
    nobodys = ModelCard("", Path(), "", ("",), "")
    return [
        asked.plugin
        for asked in manager.ask("model_state", card=nobodys, settings=load_settings({}))
        for answer in asked.answers
        if isinstance(answer, Decline) and architecture in answer.accepts
    ]


def words_for(name: str, kind: str, manager: PluginManager, architecture: str = "") -> dict[str, str]:
    """What the templates' `$words` stand for. architecture: empty for a guess. Raises PluginError when one cannot be used, saying why."""
    if not NAME.fullmatch(name):
        raise PluginError(f"NAME is {name!r}; accepted: lower-case letters and digits, a letter first, words parted by single hyphens")
    taken = {info.entry_point: info for info in manager.describe()}.get(name)
    if taken is not None:
        raise PluginError(f"NAME is {name!r}, which is already a plugin of {taken.distribution} {taken.version}; choose another name")
    if architecture and kind != "model-state":
        raise PluginError(f"--architecture is {architecture!r}, but a plugin of kind {kind!r} has none; leave it out")
    if architecture and not (architecture.isascii() and architecture.isidentifier()):
        raise PluginError(f"--architecture is {architecture!r}; accepted: a class name, as in config.json, e.g. OrchidForCausalLM")
    title = "".join(part.capitalize() for part in name.split("-"))
    section, major = name.replace("-", "_"), int(API_VERSION.partition(".")[0])
    return {
        "name": name,
        "distribution": f"modelrunner-{name}",
        "module": f"modelrunner_{section}",
        "section": section,
        "title": title,
        "architecture": architecture or f"{title}ForCausalLM",
        "architecture_note": f"# {MUST_EQUAL}." if architecture else f"# A guess. {MUST_EQUAL}.",
        "architecture_line": f"{MUST_EQUAL}." if architecture else f"That name is a guess. {MUST_EQUAL}.",
        "about": KINDS[kind],
        "api": f">={major},<{major + 1}",
        "api_now": f">={API_VERSION},<{major + 1}",
    }


def render(kind: str, words: Mapping[str, str]) -> dict[str, str]:
    """The files of a new package: path in its folder -> text."""
    root = files(__package__).joinpath("templates").joinpath(kind)
    found = dict(templates(root))
    return {path.replace("PACKAGE", words["module"]): Template(text).substitute(words) for path, text in found.items()}


def templates(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path without suffix, text) of every template below `folder`."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            yield prefix + entry.name.removesuffix(SUFFIX), entry.read_text(encoding="utf-8")


def write(folder: Path, contents: Mapping[str, str]) -> None:
    """Write the files. Raises PluginError when `folder` exists or cannot be made."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise PluginError(f"{folder} exists already; nothing was written. Choose another NAME or --into, or remove it") from None
    except OSError as error:
        raise PluginError(f"{folder} cannot be made: {error}") from error
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
