"""A cache in 8 bits on a GPU: its tokens are nearly the CPU's, new scales reach captured steps, and attention is as exact as the type."""

from __future__ import annotations

import pytest
import torch

from modelrunner import LLM, SamplingParams
from modelrunner.kernels import attention as reference
from modelrunner.testing import ByteTokenizerPlugin, P, tiny_dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": P(7 + 13 * k, k)} for k in range(6)]


def start(device: str, dtype: str = "float32") -> LLM:
    settings = {"device.name": device, "model.dtype": dtype, "cache.dtype": "fp8", "cache.num_pages": 64, "scheduler.max_rows": 8}
    return LLM(str(tiny_dense()), plugins=[ByteTokenizerPlugin()], **settings)


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_tokens_are_those_of_the_cpu() -> None:
    """In float32, where only numbers that are rounded the other way can part them: at most one request of six."""
    got, want = tokens(start("cuda")), tokens(start("cpu"))
    assert sum(a == b for a, b in zip(got, want, strict=True)) >= 5


def test_new_scales_reach_captured_steps() -> None:
    llm = start("cuda", "bfloat16")
    assert "captured" in llm.engine.assembly.resolved.graphs
    before = tokens(llm)
    scales = llm.engine.assembly.scales.by_group["full"]
    named, kept = llm.calibrate_cache(PROMPTS), scales.clone()
    assert sum(a[0] == b[0] for a, b in zip(tokens(llm), before, strict=True)) >= 5
    weights = llm.engine.assembly.state.module.state_dict()
    assert weights
    scales.fill_(2.0**-20)
    llm.engine.scheduler.reset_prefix_cache()
    assert tokens(llm) != before, "nothing fits any more"
    again = llm.calibrate_cache(PROMPTS)
    assert torch.equal(scales, kept)
    assert all(torch.equal(again[name], named[name]) for name in named)


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_error_of_attention_against_bfloat16(rows: int) -> None:
    """Of random keys and values: below 6% of the output, where the type's own rounding alone gives some 4%."""
    from modelrunner.kernels.attention import gpu

    heads, kv_heads, dim, page, length = 16, 8, 128, 16, 512
    pages = length // page
    q, k, v = (torch.randn(rows * n, h, dim, device="cuda").bfloat16() for n, h in ((1, heads), (length, kv_heads), (length, kv_heads)))
    table = torch.arange(1, 1 + rows * pages, device="cuda", dtype=torch.int32).view(rows, pages)
    count = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    lists = (
        table,
        count,
        torch.ones_like(count[1:]),
        torch.full_like(count[1:], length),
        count[:-1].long(),
        count[:-1].long() * 0 + length - 1,
    )
    bounds = {"num_decode": rows, "decode_query": 1, "max_query": 1, "max_seq_len": length, "scale": dim**-0.5}
    outputs = {}
    scales = torch.rand(2, kv_heads, device="cuda") + 0.01
    for kept, options in ((torch.bfloat16, {}), (torch.float8_e4m3fn, {"scales": scales})):
        cache = torch.zeros(1 + rows * pages, page, 2, kv_heads, dim, device="cuda").to(kept)
        gpu.write_cache(cache, k, v, torch.arange(page, page + rows * length, device="cuda"), **options)
        outputs[kept] = gpu.paged_attention(q, cache, *lists, **bounds, **options).float()
        plain = reference.paged_attention(q, cache, *lists, **bounds, **options).float()
        torch.testing.assert_close(outputs[kept], plain, rtol=1.6e-2, atol=1.6e-2)
    want = outputs[torch.bfloat16]
    error = (outputs[torch.float8_e4m3fn] - want).norm() / want.norm()
    assert 0.005 < error < 0.06
