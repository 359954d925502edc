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
from modelrunner.plugins.commands import sampling_options

if TYPE_CHECKING:
    from modelrunner.logprobs import Logprob
    from modelrunner.plugin_manager import PluginManager
    from modelrunner.request import RequestOutput, SamplingParams

DEFAULT_MAX_TOKENS = 64


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
    sampling_options.add_arguments(parser, default_max_tokens=DEFAULT_MAX_TOKENS)
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a line: prompt_token_ids, token_ids, text, finish_reason, stop_reason, and counts: num_prompt_tokens, "
        "num_cached_tokens, num_drafted, num_accepted, num_steps (of all prompts together), seconds, seconds_to_first_token",
    )
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
    from modelrunner.request import SamplingParams, default_params

    check(args)
    images = [read_image(path) for path in args.images]
    given = sampling_options.given(args)
    SamplingParams(**given)  # a wrong parameter is told before the model is loaded
    from modelrunner.llm import LLM

    with LLM(args.model or "", plugins=args.plugins, **trace.traced(args.settings, args.trace)) as llm:
        params = SamplingParams(**{**default_params(llm.card).model_dump(exclude_defaults=True), **given})
        outputs = generate(llm, args.prompts, params, args.chat, images)
        decodes, num_steps = llm.tokenizer is not None, llm.engine.scheduler.stats.steps
    show_json(outputs, num_steps) if args.json else show_text(args.prompts, outputs, args.chat, decodes)
    failed = [(place, output.outputs[0]) for place, output in enumerate(outputs, 1) if output.outputs[0].finish_reason == "error"]
    for place, answer in failed:
        print(
            f"modelrunner: error: output {place} of {len(outputs)} ended early: {answer.stop_reason or 'no reason given'}", file=sys.stderr
        )
    return 1 if failed else 0


def check(args: argparse.Namespace) -> None:
    """Refuse options that do not go together. Raises RequestError."""
    from modelrunner.errors import RequestError

    if not args.prompts:
        raise RequestError("no prompt: give --prompt TEXT, --prompt-file FILE (- for standard input) or --prompt-ids IDS")
    if "" in args.prompts:
        raise RequestError(f"prompt {args.prompts.index('') + 1} of {len(args.prompts)} is empty; accepted: at least one character")
    if args.chat and not all(isinstance(prompt, str) for prompt in args.prompts):
        raise RequestError("--prompt-ids with --chat: a chat template takes text; give --prompt, or leave --chat out")
    if args.images and len(args.prompts) > 1:
        raise RequestError(f"--image with {len(args.prompts)} prompts; give one prompt with images")
    if not args.json and (args.logprobs is not None or args.prompt_logprobs is not None):
        raise RequestError("--logprobs and --prompt-logprobs are shown by --json only; add it")


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


def show_json(outputs: Sequence[RequestOutput], num_steps: int) -> None:
    """A line for each output. num_steps: that the engine took for all of them."""
    for output in outputs:
        choice, times = output.outputs[0], output.metrics
        line: dict[str, Any] = {
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(choice.token_ids),
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
            "num_drafted": choice.num_drafted,
            "num_accepted": choice.num_accepted,
            "num_steps": num_steps,
            "seconds": since(times.arrival_time, times.finished_time),
            "seconds_to_first_token": since(times.arrival_time, times.first_token_time),
        }
        if choice.logprobs is not None:
            line["logprobs"] = [entries(found) for found in choice.logprobs]
            line["cumulative_logprob"] = choice.cumulative_logprob
        if output.prompt_logprobs is not None:
            line["prompt_logprobs"] = [None if found is None else entries(found) for found in output.prompt_logprobs]
        print(json.dumps(line, allow_nan=False))


def since(start: float, end: float | None) -> float | None:
    """Seconds between two times, to a tenth of a millisecond; None if it never came to the second."""
    return None if end is None else round(end - start, 4)


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
