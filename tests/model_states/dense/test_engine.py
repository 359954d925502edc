"""Greedy tokens of the whole engine equal those of transformers: every architecture and variant, chunked, in a batch, two steps deep."""

from __future__ import annotations

import pytest

from modelrunner import LLM, SamplingParams
from tests.model_states.dense.oracle import assert_greedy
from tests.model_states.dense.test_forward import VARIANTS

PROMPTS = [[(7 * i * i + 3 * i + k) % 97 for i in range(n)] for k, n in enumerate((1, 5, 17, 23, 40))]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SHAPES = {
    "one chunk, one step deep": {"pipeline_depth": 1, "max_batched_tokens": 512},
    "small chunks, two steps deep": {"pipeline_depth": 2, "max_batched_tokens": 13},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers(variant, make_oracle, save):
    model_type, fields = VARIANTS[variant]
    model = make_oracle(model_type, **fields)
    folder = save(model)
    for shape in SHAPES.values():
        scheduler = {"max_rows": 4, **shape}
        llm = LLM(str(folder), device="deferred_cpu", skip_tokenizer_init=True, num_gpu_blocks_override=64, scheduler=scheduler)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
        compared = [assert_greedy(model, p, o.outputs[0].token_ids) for p, o in zip(PROMPTS, outputs, strict=True)]
        assert sum(compared) >= 0.9 * len(PROMPTS) * 24  # near-ties are rare
        llm.engine.scheduler.check()
