"""Times structured output by automata on the device against masks from the host: `python tests/gpu/bench_grammars.py [--dry] [--kernels]`.

First the kernels, in microseconds in a CUDA graph, at the size of Qwen3's vocabulary: masks of states laid on the logits, beside the copy
that they need where other edits come too; the walk of the sampled tokens; the masks of a grammar's states. Then engines with made-up
weights and a vocabulary of made-up byte strings: tokens a second of rows that all have a grammar, half of them, or none. The host's
masks lie ready in a table, so its way costs less here than with a grammar library. --dry: small, on the CPU, in Triton's interpreter.
--kernels: nothing else.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "plugins_fixtures"))

import torch  # noqa: E402
from grammar_world import TablePlugin  # noqa: E402

from modelrunner import Offer, SamplingParams, StructuredOutputsParams, hookimpl  # noqa: E402
from modelrunner.engine import Engine  # noqa: E402
from modelrunner.grammar import Vocabulary  # noqa: E402
from modelrunner.kernels.automata import gpu as automata  # noqa: E402
from modelrunner.kernels.logits import gpu as logits  # noqa: E402
from modelrunner.plugins.bench.models import MODELS, model_folder  # noqa: E402
from modelrunner.plugins.grammars.ebnf import automaton_of  # noqa: E402
from modelrunner.testing.byte_tokenizer import ByteTokenizer  # noqa: E402

MODEL = "tiny" if DRY else "qwen3-0.6b"
VOCAB: int = MODELS[MODEL]["vocab_size"]
DEVICE = "cpu" if DRY else "cuda"
ROWS = (2,) if DRY else (1, 32, 256)
DRAFTS = 3
BATCH, OUTPUT = (4, 12) if DRY else (64, 256)
WORDS = 'root ::= ([a-z ]* "!")'
JSON = r"""
space ::= (([ \n\r\t]))
text ::= ("\"" [^\0-\x1f\"\\]* "\"")
digits ::= ([0-9] [0-9]*)
next ::= (space{0, 16} "," space{0, 16})
is ::= (space{0, 16} ":" space{0, 16})
first ::= (space{0, 16} "\"name\"" is text next "\"age\"" is digits)
second ::= ("\"city\"" is ("\"Oslo\"" | "\"Rome\"") next "\"note\"" is text space{0, 16})
root ::= ("{" first next second "}")
""".strip()


class Tokenizer:
    """Offers a vocabulary of the model's size: all bytes, and made-up strings of letters as long as real tokens are."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(self) -> None:
        rng, made = random.Random(0), dict[bytes, None]()
        while len(made) < VOCAB - 270:
            made[bytes(rng.choice(b"  etaoinshrdlucmfwypvbgkjqxz") for _ in range(rng.choice((2, 3, 4, 5, 6, 7, 8, 10, 14))))] = None
        self.made = ByteTokenizer(VOCAB, tuple(made))

    @hookimpl
    def tokenizer(self, card: Any) -> Any:
        return Offer("made-up", lambda: self.made)


def microseconds(call: Callable[[], Any], copies: int = 8) -> float:
    if DRY:
        call()
        return 0.0
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            call()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / copies)
    return statistics.median(times[2:])


def kernels(tokenizer: ByteTokenizer) -> None:
    """Each row is in a state of its own, as far as there are so many."""
    tokens, automaton = tokenizer.token_bytes(), automaton_of(JSON, 2048)
    states, text = automaton.num_states, Vocabulary(tokens, (2,)).packed
    edges = torch.from_numpy(automaton.edges).to(DEVICE)
    accepting = torch.from_numpy(automaton.accepting.astype("uint8")).to(DEVICE)
    start, stops = torch.from_numpy(text.start).to(DEVICE), torch.from_numpy(text.stops).to(DEVICE)
    given = (start, torch.from_numpy(text.text.copy()).to(DEVICE), text.longest, stops)
    masks = torch.zeros(states + 1, stops.shape[0], dtype=torch.int32, device=DEVICE)
    closed = torch.zeros(states, dtype=torch.uint8, device=DEVICE)
    fill = automata.OVERRIDES["mask_states"]
    took = microseconds(lambda: fill(0, states, edges, accepting, *given, masks, closed), 2)
    size = masks.nbytes / 2**20
    print(f"masks of {states} states, {VOCAB} ids, {text.text.size} bytes: {took:.0f} us, {size:.1f} MiB", flush=True)
    share = [int(word).bit_count() for word in (masks[:states].to(torch.int64) & 0xFFFFFFFF).sum(1).tolist()]
    assert any(share)
    for n in ROWS:
        print(line_of(n, masks, edges, closed, given), flush=True)


def line_of(n: int, masks: torch.Tensor, edges: torch.Tensor, closed: torch.Tensor, given: tuple[Any, ...]) -> str:
    """Times of n rows."""
    edit, mask, walk = logits.OVERRIDES["edit_logits"], logits.OVERRIDES["mask_logits"], automata.OVERRIDES["walk_tokens"]
    rows = torch.arange(n, dtype=torch.int32, device=DEVICE)
    at = rows * 7 % edges.shape[0]
    some, known, going = torch.where(rows % 10 == 0, at, -1), torch.ones_like(rows), at.clone()
    x = torch.randn(n, VOCAB, device=DEVICE).to(torch.float32 if DRY else torch.bfloat16)
    drawn, yes = torch.randint(0, VOCAB, (n, 1), device=DEVICE), torch.ones(n, dtype=torch.bool, device=DEVICE)
    every = microseconds(lambda: mask(x, rows, None, (at, masks)))
    few = microseconds(lambda: mask(x, rows, None, (some, masks)))
    copied = microseconds(lambda: edit(x, rows, known, known, known.unsqueeze(1), None, None, None, None, None, (at, masks)))
    gone = microseconds(lambda: walk(rows, yes, yes, drawn, None, going, edges, closed, *given))
    lead, lay = drafted(n, masks, edges, at, given)
    found = f"{n} rows: masks on all {every:.1f} us, on a tenth {few:.1f}, with a copy {copied:.1f}; walk {gone:.1f}"
    return f"{found}; with {DRAFTS} drafts a row: states of all lines {lead:.1f}, masks on them {lay:.1f}"


def drafted(n: int, masks: torch.Tensor, edges: torch.Tensor, at: torch.Tensor, given: tuple[Any, ...]) -> tuple[float, float]:
    """Of n rows with drafts that the grammar allows: states of their lines, and masks by them."""
    slots, (start, text, longest, _) = 1 + DRAFTS, given
    lines = torch.arange(n, dtype=torch.int32, device=DEVICE).repeat_interleave(slots)
    ahead = torch.arange(slots, dtype=torch.int32, device=DEVICE).repeat(n)
    places, states = (lines, torch.ones_like(lines, dtype=torch.bool), ahead, torch.zeros_like(ahead)), at.clone()
    drafts = torch.randint(0, VOCAB, (n, slots), dtype=torch.int32, device=DEVICE)
    lead = automata.OVERRIDES["draft_states"]
    for j in range(DRAFTS):  # a token that its state's mask allows, if there is one
        state = lead(*places, drafts, slots, states, edges, start, text, longest).view(n, slots)[:, j]
        word = masks[state.clamp(min=0).long()] != 0
        first = word.int().argmax(1)
        bits = masks[state.clamp(min=0).long(), first].unsqueeze(1) >> torch.arange(32, device=DEVICE)
        drafts[:, j] = (first * 32 + (bits & 1).argmax(1)).clamp(max=VOCAB - 1).int()
    x = torch.randn(n * slots, VOCAB, device=DEVICE).to(torch.float32 if DRY else torch.bfloat16)
    found = lead(*places, drafts, slots, states, edges, start, text, longest)
    took = microseconds(lambda: lead(*places, drafts, slots, states, edges, start, text, longest))
    return took, microseconds(lambda: logits.OVERRIDES["mask_logits"](x, None, None, (found, masks)))


def engine(tokenizer: Tokenizer, way: str) -> Engine:
    room = {"max_rows": BATCH, "max_batched_tokens": 2048}
    settings: dict[str, Any] = {
        "model": {"name": str(model_folder(MODEL)), "load_format": "dummy", "max_model_len": 1024},
        "scheduler": room,
        "grammar": {"automaton_memory": 64 if way == "device" else 0},
        "device": {"name": DEVICE},
    }
    return Engine(settings, plugins=[tokenizer, TablePlugin()])


def rate(made: Engine, kind: str, share: float, temperature: float, run: int) -> tuple[float, int, float]:
    """Tokens a second from the first step in which all rows decode, tokens in all, and held rows a step."""
    rules = {"words": WORDS, "json": JSON}
    for i in range(BATCH):
        guided = StructuredOutputsParams(grammar=rules[kind]) if i < share * BATCH else None
        params = SamplingParams(
            temperature=temperature, seed=i, max_tokens=OUTPUT, ignore_eos=True, structured_outputs=guided, detokenize=False
        )
        made.add_request(f"{run}-{kind}-{share}-{i}", {"prompt_token_ids": [(i * 37 + j) % 250 + 3 for j in range(16)]}, params)
    while made.scheduler.num_running < BATCH:
        made.step()
    first, begun = replace(made.scheduler.stats), time.perf_counter()
    while made.has_unfinished():
        made.step()
    took, last = time.perf_counter() - begun, made.scheduler.stats
    tokens = last.generated_tokens - first.generated_tokens
    return tokens / took, tokens, (last.held - first.held) / max(last.steps - first.steps, 1)


def main() -> None:
    print(f"{MODEL}, {VOCAB} ids, torch {torch.__version__}", flush=True)
    tokenizer = Tokenizer()
    kernels(tokenizer.made)
    for way in () if "--kernels" in sys.argv else ("device", "host"):
        made = engine(tokenizer, way)
        for kind in ("words", "json"):
            for share in (1.0, 0.5, 0.0) if kind == "words" else (1.0,):
                for temperature in (0.0, 1.0):
                    got = [rate(made, kind, share, temperature, run) for run in range(2 if DRY else 4)][1:]
                    tokens_a_second = statistics.median(each[0] for each in got)
                    label = f"{kind} in {share:.0%} of {BATCH} rows, temperature {temperature:.0f}, masks of the {way}"
                    print(f"{label}: {tokens_a_second:,.0f} tokens/s, {got[-1][1]} tokens, {got[-1][2]:.1f} rows held a step", flush=True)
        print(f"ways: {dict(made.guides.ways)}; graphs: {made.assembly.resolved.graphs}", flush=True)
        made.close()
        del made
        if not DRY:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
