"""The command line: `modelrunner [-p MODULE] COMMAND ...`. Every command comes from a plugin, through the hook `cli_commands`.

Nothing here imports torch; a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import modelrunner
from modelrunner.errors import ModelRunnerError, ModelRunnerWarning, PluginError, SettingsError
from modelrunner.plugin_loader import STRICT, read_flag
from modelrunner.plugin_manager import PluginManager

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of an open file; a name that cannot be opened comes with the error


@dataclass(frozen=True)
class Command:
    """A subcommand.

    run(args, manager) -> exit status. `manager` has the installed plugins and those of `-p`; broken plugins do not stop a command,
    unless it starts an engine. `args` has what `add_arguments` declared, and `args.plugins`: the modules of `-p`, for `LLM(plugins=...)`.
    takes_settings: options that `add_arguments` did not declare are settings (`--section.name value` or a flat alias) and arrive as
    the mapping `args.settings`, for `load_settings` or `LLM(**args.settings)`. A ModelRunnerError from `run` is shown in one message.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, PluginManager], int]
    takes_settings: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 2 for a wrong call or a ModelRunnerError, whose message goes to standard error,
    and for output that cannot be written."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model may say what a terminal of another encoding cannot show
    head, rest = _head_parser().parse_known_args(sys.argv[1:] if argv is None else list(argv))
    with _plain_warnings(), _current_folder_on_path(head.plugins):
        try:
            status = _status(head, rest)
            if sys.stdout is not None:
                sys.stdout.flush()  # what cannot be written is told here, not by a traceback at the interpreter's end
            return status
        except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
            _discard_output()
            return EXIT_BROKEN_PIPE
        except OSError as error:
            if error.errno not in CANNOT_WRITE or error.filename is not None:
                raise
            print(f"modelrunner: error: the output could not be written: {error.strerror}", file=sys.stderr)
            _discard_output()
            return EXIT_ERROR


def _status(head: argparse.Namespace, rest: list[str]) -> int:
    """Run, and turn what ends a command early into an exit status."""
    try:
        return _run(head, rest)
    except ModelRunnerError as error:
        if head.traceback:
            traceback.print_exc()
        else:
            print("\n".join([f"modelrunner: error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return EXIT_ERROR
    except SystemExit as error:  # argparse, after it has printed
        return error.code if isinstance(error.code, int) else EXIT_ERROR if error.code else 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _discard_output() -> None:
    """Send what is left of standard output nowhere, so that the interpreter's end does not try to write it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _head_parser() -> argparse.ArgumentParser:
    """What may stand anywhere on the line, and is needed before the commands are known."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-p", dest="plugins", metavar="MODULE", action="append", default=[], help="load MODULE as a plugin; repeatable")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser


def _run(head: argparse.Namespace, rest: list[str]) -> int:
    if rest[:1] == ["--version"]:
        print(f"modelrunner {modelrunner.__version__}")
        return 0
    manager = PluginManager.load(head.plugins, strict=False)
    commands = collect_commands(manager)
    parser = argparse.ArgumentParser(
        "modelrunner", description="An LLM execution engine of plugins.", allow_abbrev=False, parents=[_head_parser()]
    )
    parser.add_argument("--version", action="version", version=f"modelrunner {modelrunner.__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {name: _command_parser(choices, command) for name, command in sorted(commands.items())}
    if not rest:
        parser.print_help()
        return 0
    if not rest[0].startswith("-") and rest[0] not in commands:
        raise PluginError(_unknown_command(rest[0], commands, manager))
    command = commands.get(rest[0])
    given: list[str] = []
    own = _options(parsers[command.name]) if command is not None else set()
    if command is not None and command.takes_settings:
        rest, given = split_settings(rest, own)
    args = parser.parse_args(rest)
    args.plugins, args.settings = head.plugins, settings_arguments(given, own)
    return commands[args.command].run(args, manager)


def plugin_status(manager: PluginManager) -> int:
    """Exit status of a command that reports on plugins: 2 when MODELRUNNER_STRICT_PLUGINS is set and one failed or a listed name is
    unknown, else 0."""
    return EXIT_ERROR if read_flag(os.environ, STRICT) and (manager.failures or manager.notices) else 0


def collect_commands(manager: PluginManager) -> dict[str, Command]:
    """The commands of all plugins by name. Raises PluginError when two plugins bring one name."""
    commands: dict[str, Command] = {}
    owners: dict[str, str] = {}
    for plugin, answer in manager.collect("cli_commands"):
        for command in answer:
            if command.name in commands:
                raise PluginError(
                    f"plugins {owners[command.name]!r} and {plugin!r} both bring the command {command.name!r}; "
                    f"disable one of them with MODELRUNNER_DISABLE_PLUGINS={plugin}"
                )
            commands[command.name], owners[command.name] = command, plugin
    return commands


def _command_parser(choices: Any, command: Command) -> argparse.ArgumentParser:
    note = "Settings: --section.name VALUE, or a flat alias such as --max-model-len VALUE; `modelrunner settings show` lists them."
    parser: argparse.ArgumentParser = choices.add_parser(
        command.name, help=command.help, description=command.help, epilog=note if command.takes_settings else None, allow_abbrev=False
    )
    command.add_arguments(parser)
    return parser


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Every option that `parser` or a parser below it declares (argparse has no public way to ask)."""
    options = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            options.update(*(_options(below) for below in action.choices.values()))
    return options


def _unknown_command(name: str, commands: Collection[str], manager: PluginManager) -> str:
    near = get_close_matches(name, commands, n=1)
    lines = [
        f"no command {name!r}; " + (f"did you mean {near[0]!r}? " if near else "") + f"Commands are {', '.join(sorted(commands)) or 'none'}"
    ]
    return "\n".join([*lines, *(f"  {failure}" for failure in manager.failures)])


# Settings on the command line


def split_settings(tokens: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Part a command's line into its own tokens and those of settings: `--name=value`, `--name value`, or `--name` alone, for a switch.

    own: the options that the command declares; after `--` nothing is a setting. The token after a setting is its value unless it looks
    like an option, so a switch that stands before a positional argument needs `=true`.
    """
    mine: list[str] = []
    settings: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token == "--":
            return [*mine, token, *rest], settings
        if not token.startswith("--") or token.partition("=")[0] in own:
            mine.append(token)
            continue
        settings.append(token)
        if "=" not in token and rest and not _looks_like_option(rest[0]):
            settings.append(rest.pop(0))
    return mine, settings


def settings_arguments(tokens: Sequence[str], own: Collection[str] = ()) -> dict[str, Any]:
    """Settings as `load_settings` takes them: {"section.name" or alias: text, or True for a switch}.

    Dashes in names count as underscores, `--no-NAME` is a switch turned off. Values stay text: `load_settings` reads them by the setting's
    type, so that a model may be called 7. Raises SettingsError for an unknown flat name, with near ones (also of `own`, the command's
    options), and for a name given twice; dotted names are checked by `load_settings`, which knows the plugins' sections.
    """
    from modelrunner.settings import ALIASES

    known = {*ALIASES, "config_file"}
    settings: dict[str, Any] = {}
    for option, value in _pairs(tokens):
        name = option.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        if value is None and name != positive and ("." in positive or positive in known):
            name, value = positive, "false"
        if not option.startswith("--") or not ("." in name or name in known or (value or "").lstrip().startswith("{")):
            raise _unknown_option(option, known, own)
        if name in settings:
            raise SettingsError(f"{option} is given twice; keep one")
        settings[name] = True if value is None else value
    return settings


def _pairs(tokens: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    rest = list(tokens)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if equals:
            yield option, value
        elif rest and not _looks_like_option(rest[0]):
            yield option, rest.pop(0)
        else:
            yield option, None


def _looks_like_option(token: str) -> bool:
    """Negative numbers and a lone dash are values."""
    return token.startswith("-") and token != "-" and not (token[1].isdigit() or token[1] == ".")


def _unknown_option(option: str, known: Collection[str], own: Collection[str]) -> SettingsError:
    flags = {f"--{name.replace('_', '-')}" for name in known}
    near = get_close_matches(option, {*flags, *own}, n=3)
    hint = f"near names are {', '.join(near)}" if near else f"flat names are {', '.join(sorted(flags))}"
    return SettingsError(f"unknown option {option!r}: neither an option of this command nor a setting (--section.name VALUE); {hint}")


@contextmanager
def _current_folder_on_path(plugins: Sequence[str]) -> Iterator[None]:
    """Where the modules of -p are found; the path is left as it was."""
    added = bool(plugins) and "" not in sys.path
    if added:
        sys.path.insert(0, "")
    try:
        yield
    finally:
        if added and "" in sys.path:
            sys.path.remove("")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show a warning for users as one line, without the source line that raised it."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, ModelRunnerWarning):
            print(f"modelrunner: warning: {message}", file=sys.stderr)
        else:
            shown(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


if __name__ == "__main__":
    sys.exit(main())
