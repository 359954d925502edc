"""`modelrunner generate`: complete prompts from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelrunner.cli import Command
from modelrunner.plugins import trace

if TYPE_CHECKING:
    from modelrunner.logprobs import Logprob
    from modelrunner.plugin_manager import PluginManager
    from modelrunner.request import RequestOutput, SamplingParams

DEFAULT_MAX_TOKENS = 64
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "logprobs", "prompt_logprobs")


def command() -> Command:
    """The command's description; torch is imported only when it runs."""
    return Command("generate", "complete prompts, or answer them with --chat", add_arguments, run, takes_settings=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME", help="hub id, folder, or .gguf file; without it, the small model that `make demo` installs"
    )
    parser.add_argument("--prompt", dest="prompts", metavar="TEXT", action="append", default=[], help="text to complete; repeatable")
    parser.add_argument(
        "--prompt-file", dest="prompts", metavar="FILE", action="append", type=read_prompt_file, default=[],
        help="file that holds one prompt, - for standard input; a line end at its end is left out; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-ids", dest="prompts", metavar="IDS", action="append", type=read_ids, default=[],
        help="token ids to go on after, separated by commas, e.g. 1,2,3; with --skip-tokenizer-init they need no tokenizer; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--image", dest="images", metavar="FILE", action="append", type=Path, default=[],
        help="image that the prompt is about; repeatable, in the order of its placeholders; with --chat they come before the text",
    )  # fmt: skip
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template, as the user's message")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="most tokens to generate (%(default)s)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 for greedy; default: the model's own, else 1")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that together hold this probability")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among this many tokens")
    parser.add_argument("--min-p", type=float, metavar="P", help="sample among tokens at least this fraction as likely as the best")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the output before this text; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of the sequence")
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a line: prompt_token_ids, token_ids, text, finish_reason; with a drafter num_drafted, num_accepted",
    )
    parser.add_argument(
        "--logprobs", type=int, metavar="N",
        help="with --json, list for each token its log-prob and those of the N likeliest ones; -9999 is a token that could not come",
    )  # fmt: skip
    parser.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same for each token of the prompt but the first")
    trace.add_option(parser)


def read_prompt_file(name: str) -> str:
    """The prompt in a file, without a line end at its end."""
    if name == "-" and sys.stdin is None:
        raise argparse.ArgumentTypeError("-: standard input is closed")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        text = data.decode("utf-8-sig")  # without the mark that some editors put at the beginning
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{name}: not UTF-8 text (byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")


def read_ids(text: str) -> list[int]:
    """A prompt of token ids."""
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: token ids separated by commas, e.g. 1,2,3") from None


def run(args: argparse.Namespace, manager: PluginManager) -> int:
    """Generate and print. Returns 1 when an output ended in an error."""
    from modelrunner.errors import RequestError
    from modelrunner.request import SamplingParams, default_params

    if not args.prompts:
        raise RequestError("no prompt: give --prompt TEXT, --prompt-file FILE (- for standard input) or --prompt-ids IDS")
    if "" in args.prompts:
        raise RequestError(f"prompt {args.prompts.index('') + 1} of {len(args.prompts)} is empty; accepted: at least one character")
    if args.chat and not all(isinstance(prompt, str) for prompt in args.prompts):
        raise RequestError("--prompt-ids with --chat: a chat template takes text; give --prompt, or leave --chat out")
    if args.images and len(args.prompts) > 1:
        raise RequestError(f"--image with {len(args.prompts)} prompts; give one prompt with images")
    images = [read_image(path) for path in args.images]
    if not args.json and (args.logprobs is not None or args.prompt_logprobs is not None):
        raise RequestError("--logprobs and --prompt-logprobs are shown by --json only; add it")
    given = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    SamplingParams(**given)  # a wrong parameter is told before the model is loaded
    from modelrunner.llm import LLM

    with LLM(args.model or "", plugins=args.plugins, **trace.traced(args.settings, args.trace)) as llm:
        params = SamplingParams(**{**default_params(llm.card).model_dump(exclude_defaults=True), **given})
        outputs = generate(llm, args.prompts, params, args.chat, images)
        decodes = llm.tokenizer is not None
    show_json(outputs) if args.json else show_text(args.prompts, outputs, args.chat, decodes)
    return 1 if any(output.outputs[0].finish_reason == "error" for output in outputs) else 0


def read_image(path: Path) -> bytes:
    """The bytes of an image file. Raises RequestError."""
    from modelrunner.errors import RequestError

    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise RequestError(f"--image {path}: {error.strerror}") from None


def generate(
    llm: Any, prompts: Sequence[str | list[int]], params: SamplingParams, chat: bool, images: Sequence[bytes] = ()
) -> list[RequestOutput]:
    """Complete the prompts, or answer each as a conversation of its own. images: of the only prompt."""
    if chat:
        parts = [{"type": "image", "image": image} for image in images]
        contents = [[*parts, {"type": "text", "text": prompt}] if parts else prompt for prompt in prompts]
        return list(llm.chat([[{"role": "user", "content": content}] for content in contents], params))
    if not images:
        return list(llm.generate(list(prompts), params))
    (prompt,) = prompts
    named = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    return list(llm.generate({**named, "multi_modal_data": {"image": list(images)}}, params))


def show_json(outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        choice = output.outputs[0]
        line: dict[str, Any] = {
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(choice.token_ids),
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "num_drafted": choice.num_drafted,
            "num_accepted": choice.num_accepted,
        }
        if choice.logprobs is not None:
            line["logprobs"] = [entries(found) for found in choice.logprobs]
            line["cumulative_logprob"] = choice.cumulative_logprob
        if output.prompt_logprobs is not None:
            line["prompt_logprobs"] = [None if found is None else entries(found) for found in output.prompt_logprobs]
        print(json.dumps(line, allow_nan=False))


def entries(found: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    """Log-probs at a position: its own token's first, then those of the likeliest others."""
    return [{"token_id": token, "token": item.decoded_token, "logprob": item.finite, "rank": item.rank} for token, item in found.items()]


def show_text(prompts: Sequence[str | list[int]], outputs: Sequence[RequestOutput], chat: bool, decodes: bool) -> None:
    """Each prompt with its completion joined on; of a chat, and of token ids, the answers alone. Several have a line above each.

    decodes: whether there is a tokenizer; without one, answers are token ids.
    """
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if len(outputs) > 1:
            title = prompt if chat else f"{i + 1} of {len(outputs)}"
            print(f"{'' if i == 0 else chr(10)}==> {title} <==")
        answer = output.outputs[0]
        head = prompt if isinstance(prompt, str) and not chat else ""
        print(head + answer.text if decodes else ",".join(map(str, answer.token_ids)))
