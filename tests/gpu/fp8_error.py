"""How far attention and logits are from those of a cache in bfloat16 when it is in float8_e4m3fn: `python3 -P tests/gpu/fp8_error.py`.

Random queries, keys and values of the shapes of Qwen3-0.6B, and that model with random weights, which nobody trained to bear errors.
`--dry`: tiny, on a CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from modelrunner import LLM, SamplingParams
from modelrunner.kernels import attention as reference
from modelrunner.plugins.bench.models import model_folder

DRY = "--dry" in sys.argv
DEVICE = torch.device("cpu" if DRY else "cuda")
DTYPE = torch.float32 if DRY else torch.bfloat16
SIZE = (64, 4, 2, 16) if DRY else (1024, 16, 8, 128)  # tokens, heads, key-value heads, head size
E4M3 = torch.float8_e4m3fn


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def attention(kept: torch.dtype, size: float, scales: torch.Tensor | None) -> torch.Tensor:
    """The last 32 tokens' attention to all, by the device's operations. size: of keys and values."""
    if DRY:
        ops: Any = reference
    else:
        from types import SimpleNamespace

        from modelrunner.kernels.attention import gpu

        ops = SimpleNamespace(**gpu.OVERRIDES)
    tokens, heads, kv_heads, dim = SIZE
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, n, dim, generator=draw).to(DEVICE, DTYPE) for n in (heads, kv_heads, kv_heads))
    k, v = k * size, v * size
    cache = torch.zeros(1 + tokens // 16, 16, 2, kv_heads, dim, device=DEVICE).to(kept)
    options = {} if scales is None else {"scales": scales}
    ops.write_cache(cache, k, v, torch.arange(16, 16 + tokens, device=DEVICE), **options)
    rows = torch.zeros(32, dtype=torch.int64, device=DEVICE)
    lists = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 32], [32], [tokens])]
    table = torch.arange(1, 1 + tokens // 16, dtype=torch.int32, device=DEVICE).unsqueeze(0)
    positions = torch.arange(tokens - 32, tokens, device=DEVICE)
    bounds = {"num_decode": 0, "decode_query": 1, "max_query": 32, "max_seq_len": tokens}
    return ops.paged_attention(q[-32:], cache, table, *lists, rows, positions, **bounds, scale=dim**-0.5 / size, **options)


def logits(prompts: list[list[int]], calibrated: bool = False, **settings: Any) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Logits of the prompts' first tokens [prompts, vocabulary], and 32 greedy tokens of each."""
    with LLM(str(model_folder("tiny" if DRY else "qwen3-0.6b")), load_format="dummy", skip_tokenizer_init=True, max_model_len=1024,
             max_num_seqs=16, enforce_eager=True, num_gpu_blocks_override=1024, **settings) as llm:  # fmt: skip
        if calibrated:
            llm.calibrate_cache(prompts[:2])
        seen: list[torch.Tensor] = []
        state = llm.engine.runner.state
        plain = state.logits

        def noted(hidden: torch.Tensor) -> torch.Tensor:
            out = plain(hidden)
            seen.append(out.float().cpu())
            return out

        state.logits = noted  # type: ignore[method-assign]
        first = []
        for prompt in prompts:
            seen.clear()
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            first.append(seen[0][0])
        state.logits = plain  # type: ignore[method-assign]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False)
        return torch.stack(first), [tuple(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    for size in (1e-3, 0.03, 1.0, 30.0):
        want = attention(DTYPE, size, None)
        by_scale = {}
        for name, factor in {"1": 1.0, "fitted": 2.0 ** torch.tensor(size * 8 / 448).log2().ceil().item()}.items():
            scales = torch.full((2, SIZE[2]), factor, device=DEVICE)
            by_scale[name] = relative(attention(E4M3, size, scales), want)
        print(f"attention, keys and values of size {size:g}: relative error", {k: f"{v:.4f}" for k, v in by_scale.items()}, flush=True)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 500, (64 + 32 * i,), generator=draw).tolist() for i in range(16)]
    want, tokens = logits(prompts)
    for name, settings in {"float8_e4m3fn": {}, "float8_e4m3fn, calibrated": {"calibrated": True}}.items():
        got, other = logits(prompts, kv_cache_dtype="fp8", **settings)
        same = [next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 32) for x, y in zip(tokens, other, strict=True)]
        spread = want.std(-1, keepdim=True)
        print(
            f"logits, {name}: relative error {relative(got, want):.4f}, worst {float(((got - want).abs() / spread).max()):.3f} of their "
            f"spread; {sum(n > 0 for n in same)} of 16 first tokens equal, {sum(same) / 16:.1f} of 32 tokens until one differs",
            flush=True,
        )


if __name__ == "__main__":
    main()
