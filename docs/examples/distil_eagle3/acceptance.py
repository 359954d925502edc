"""What a drafter brings on prompts that no head was trained on: steps, and the share of drafts that are kept at each place.

    python acceptance.py smollm2-eagle3               # beside prompt lookup and none; --model NAME for another model

One request at a time, greedy, so that a step is one of the model's for one text; outputs are compared with those without a drafter.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from modelrunner import LLM, SamplingParams

ASKED = (
    "Tell me about the history of tea.",
    "How do I learn to swim as an adult?",
    "Write a short story about a dragon who is afraid of fire.",
    "What is the difference between a virus and a bacterium?",
    "Give me three ideas for a birthday present for my grandmother.",
    "Explain how a bicycle stays upright.",
    "Write an email to my landlord about a broken window.",
    "Why is the sky blue?",
)
TEXTS = (
    "The keeper carried warm oil up the hundred and twelve steps in a milk can, and the lamp burned until the morning. When the fog came "
    "in from the sea he rang the bell by hand, once every minute, and counted the strokes in a small notebook.",
    "Our library will be closed from Monday to Thursday while the roof is mended. Books that are due in that week may be brought back a "
    "week later at no charge. The reading room in the old school stays open, from nine to five, and so does the telephone line for "
    "renewals.",
    "A sourdough starter is flour and water in which wild yeast and bacteria live. It is fed every day: half of it is thrown away, and the "
    "same weight of flour and water is stirred in. After about ten days it doubles within six hours, and can raise a loaf.",
)
TASKS = {
    "chat": ASKED,
    "summarise": tuple(f"Summarise this text in two sentences: {text}" for text in TEXTS),
    "copy": tuple(f"Repeat this text word for word: {text}" for text in TEXTS),
}


@dataclass
class Run:
    """Outputs of a task's prompts; what they took."""

    ids: list[list[int]]
    steps: int
    drafted: list[int]
    accepted: list[int]
    seconds: float

    def __str__(self) -> str:
        tokens = sum(map(len, self.ids))
        shares = ", ".join(f"{kept / max(seen, 1):.0%}" for seen, kept in zip(self.drafted, self.accepted, strict=True))
        spent = f"{tokens} tokens in {self.steps} steps, {tokens / self.steps:.2f} a step, {self.seconds:.1f} s of CPU time"
        return f"{spent}; accepted by place: {shares}" if shares else spent


def run(llm: LLM, prompts: tuple[str, ...], max_tokens: int) -> Run:
    stats = llm.engine.scheduler.stats
    steps, drafted, accepted, begun = stats.steps, list(stats.drafted_at), list(stats.accepted_at), time.process_time()
    found = []
    for prompt in prompts:
        (output,) = llm.chat([{"role": "user", "content": prompt}], SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    spent = [[new - old for new, old in zip(*pair, strict=True)] for pair in ((stats.drafted_at, drafted), (stats.accepted_at, accepted))]
    return Run(found, stats.steps - steps, *spent, time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head", nargs="?", default="", help="folder of an EAGLE-3 head; prompt lookup alone without")
    parser.add_argument("--model", default="", help="hub id, folder or .gguf file of a chat model; the small one of `make demo` by default")
    parser.add_argument("--drafts", type=int, default=3, help="tokens that are proposed a step")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an output")
    chosen = parser.parse_args()
    base: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 1, "scheduler": {"pipeline_depth": 1}}
    drafters: dict[str, dict[str, Any]] = {"none": {}, "ngram": {"drafter": "ngram", "num_tokens": chosen.drafts}}
    if chosen.head:
        drafters["eagle3"] = {"drafter": "eagle3", "model": chosen.head, "num_tokens": chosen.drafts}
    plain: dict[str, list[list[int]]] = {}
    for drafter, speculation in drafters.items():
        with LLM(chosen.model, **base, speculation=speculation) as llm:
            for task, prompts in TASKS.items():
                found = run(llm, prompts, chosen.max_tokens)
                same = sum(a == b for a, b in zip(found.ids, plain.setdefault(task, found.ids), strict=True))
                print(f"{task}, drafter {drafter}: {found}; {same} of {len(prompts)} outputs as without", flush=True)


if __name__ == "__main__":
    main()
