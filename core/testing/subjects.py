"""Subjects: a model together with the plugins that it needs, from which tests make engines in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from modelrunner.testing.scripted import MODEL_NAME, Script, ScriptedPlugin
from modelrunner.testing.tiny import ByteTokenizerPlugin, tiny_dense

if TYPE_CHECKING:
    import torch

    from modelrunner.engine import Engine
    from modelrunner.llm import LLM
    from modelrunner.text import Tokenizer


def options(
    *,
    depth: int = 2,
    rows: int = 8,
    pages: int = 128,
    page_size: int = 16,
    tokens: int = 2048,
    mixed_tokens: int = 512,
    prefix: bool = True,
    chunked: bool = True,
    policy: str = "fcfs",
    device: str = "cpu",
    device_seed: int = 0,
    run_probability: float | None = None,
    captures: bool = False,
    cache_dtype: str = "auto",
    drafter: str | None = None,
    drafts: int = 3,
    off_above_rows: int | None = None,
    spare_tokens: int | None = None,
    captured_tokens: int = 256,
) -> dict[str, Any]:
    """Settings in short words. depth: steps in flight. rows: requests that run at once. pages: in the pool. page_size: tokens a page.
    tokens: most query tokens a step. mixed_tokens: of one in which prompts come beside many decoding rows. device: `cpu`, or `deferred_cpu`
    with the seed of its random moments, its chance to run early, and whether steps run as graphs. cache_dtype: of keys and values.
    drafter: by name, which proposes so many drafts, but none beside more than off_above_rows decoding rows. spare_tokens: how many is
    chosen from step to step. captured_tokens: most of a step with prompts that `cuda` captures, as a graph of a recurrence in plain torch
    has some kernels a token."""
    values: dict[str, Any] = {
        "scheduler": {
            "pipeline_depth": depth,
            "max_rows": rows,
            "max_batched_tokens": tokens,
            "max_mixed_tokens": mixed_tokens,
            "chunked_prefill": chunked,
            "policy": policy,
        },
        "cache": {"num_pages": pages, "page_size": page_size, "prefix_caching": prefix, "dtype": cache_dtype},
        "device": {"name": device},
    }
    if device == "cuda":
        values["graphs"] = {"max_tokens": captured_tokens}
    if device == "deferred_cpu":
        section = {"seed": device_seed, "captures": captures} | ({} if run_probability is None else {"run_probability": run_probability})
        values["plugin"] = {"deferred_cpu": section}
    if drafter is not None:
        values["speculation"] = {"drafter": drafter, "num_tokens": drafts, "off_above_rows": off_above_rows}
        if spare_tokens is not None:
            values["speculation"] |= {"adaptive": True, "spare_tokens": spare_tokens}
    return values


REFERENCE = {"depth": 1, "rows": 1, "pages": 128, "prefix": False, "chunked": False}


@dataclass(frozen=True)
class Subject:
    """A model and its plugins. `key` tells subjects apart in the cache of reference results.

    logits: ids of one sequence -> [length, vocabulary], by somebody else; None: transformers can load the model, and says.
    """

    model: str
    key: str
    plugins: Sequence[object] = field(default=(), compare=False, hash=False)
    logits: Callable[[Sequence[int]], torch.Tensor] | None = field(default=None, compare=False, hash=False)

    def engine(self, **short: Any) -> Engine:
        """An engine on the model. short: see `options`. Tests make caches small on purpose: the warning that they are is left out."""
        from modelrunner.engine import Engine

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*max_model_len.*")
            return Engine({"model": {"name": self.model}} | options(**short), plugins=self.plugins)

    def llm(self, **short: Any) -> LLM:
        """The same behind an `LLM`."""
        from modelrunner.llm import LLM

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*max_model_len.*")
            return LLM(self.model, plugins=self.plugins, **options(**short))


@lru_cache(maxsize=8)
def dense(seed: int = 1) -> Subject:
    """The tiny Llama (see `tiny_dense`) with a byte tokenizer. Seed 1 keeps the two best logits of the cases apart by 1e-3 and more."""
    return Subject(str(tiny_dense(seed)), f"dense-{seed}", (ByteTokenizerPlugin(),))


def scripted(script: Script, key: str, *, tokenizer: Tokenizer | None = None, context: int = 256) -> Subject:
    """The model without weights. key: must differ for scripts that differ."""
    return Subject(MODEL_NAME, key, (ScriptedPlugin(script, tokenizer=tokenizer, context=context),))
