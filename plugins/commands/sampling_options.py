"""Sampling parameters as options of a command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PLAIN = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "num_draft_tokens",
)
STRUCTURED = {"choice": "--choice", "regex": "--regex", "json": "--json-schema", "grammar": "--grammar", "json_object": "--json-object"}


def add_arguments(parser: argparse.ArgumentParser, default_max_tokens: int) -> None:
    """Declare the options; one that is not given is None."""
    parser.add_argument("--max-tokens", type=int, default=default_max_tokens, metavar="N", help="most tokens to generate (%(default)s)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 for greedy; default: the model's own, else 1")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that together hold this probability")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among this many tokens")
    parser.add_argument("--min-p", type=float, metavar="P", help="sample among tokens at least this fraction as likely as the best")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the output before this text; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of the sequence")
    parser.add_argument(
        "--logprobs", type=int, metavar="N",
        help="with --json, list for each token its log-prob and those of the N likeliest ones; -9999 is a token that could not come",
    )  # fmt: skip
    parser.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same for each token of the prompt but the first")
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="N", help="with a drafter, most tokens that are proposed a step; 0 for none"
    )
    add_structured(parser)


def add_structured(parser: argparse.ArgumentParser) -> None:
    """Declare what the output may have to look like: at most one of these."""
    group = parser.add_argument_group("structured output", "what the output must look like; at most one of these")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="the output is this text, or another of the --choice given; repeatable"
    )
    group.add_argument("--regex", metavar="EXPRESSION", help="the whole output matches this regular expression")
    group.add_argument(
        "--json-schema", dest="json_schema", metavar="FILE", type=read_schema, help="the output is JSON that satisfies the schema in FILE"
    )
    group.add_argument(
        "--grammar", metavar="FILE", type=read_text, help="the output follows the grammar in FILE, in EBNF, whose start is `root`"
    )
    group.add_argument("--json-object", action="store_true", default=None, help="the output is some JSON object")


def read_text(name: str) -> str:
    """What is in a file."""
    try:
        return Path(name).expanduser().read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{name}: not UTF-8 text (byte {error.start})") from None


def read_schema(name: str) -> str:
    """The text of a file that must hold a JSON object."""
    text = read_text(name)
    try:
        if isinstance(json.loads(text), dict):
            return text
        reason = "accepted: a JSON object, the schema"
    except (ValueError, RecursionError) as error:
        reason = f"not JSON: {error}"
    raise argparse.ArgumentTypeError(f"{name}: {reason}") from None


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling parameters that the command line names. Raises RequestError for what no output could look like."""
    params = {name: value for name in PLAIN if (value := getattr(args, name)) is not None}
    wanted = {
        field: value for field, option in STRUCTURED.items() if (value := getattr(args, option.strip("-").replace("-", "_"))) is not None
    }
    if not wanted:
        return params
    from modelrunner.errors import RequestError
    from modelrunner.structured_outputs import StructuredOutputsParams

    if len(wanted) > 1:
        raise RequestError(f"{' and '.join(STRUCTURED[field] for field in wanted)} together; accepted: one of them")
    return {**params, "structured_outputs": StructuredOutputsParams(**wanted)}
