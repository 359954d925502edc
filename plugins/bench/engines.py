"""The engines that a benchmark runs: ours, and `generate` of transformers on the same weights."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from modelrunner.errors import CheckpointError, ModelRunnerError
from modelrunner.plugins.bench.scenarios import Job, static_batches
from modelrunner.request import SamplingParams

if TYPE_CHECKING:
    import torch

    from modelrunner.checkpoint import ModelCard
    from modelrunner.llm import LLM

WARM_UP_TOKENS = 2


class BenchEngine(Protocol):
    """Something that generates greedily."""

    name: str

    def prepare(self) -> None:
        """Called before each run, outside of what is timed."""

    def run(self, jobs: Sequence[Job], batch: int) -> list[list[int]]:
        """Generate each job's tokens, exactly as many as it asks for. batch: see `Scenario`. Returns the ids, in order."""


class OurEngine:
    """modelrunner. It forgets cached prefixes between runs, so that each computes every prompt."""

    name = "modelrunner"

    def __init__(self, llm: LLM, name: str = name) -> None:
        """name: what tells it from another of ours."""
        self.llm = llm
        self.name = name

    def prepare(self) -> None:
        self.llm.engine.scheduler.reset_prefix_cache()

    def run(self, jobs: Sequence[Job], batch: int) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=job.output, ignore_eos=True, detokenize=False) for job in jobs]
        outputs = self.llm.generate([list(job.prompt) for job in jobs], params, use_tqdm=False)
        return exact(self.name, jobs, [list(output.outputs[0].token_ids) for output in outputs])


class TransformersEngine:
    """`generate` of transformers: static batches in order of arrival, padded on the left, each run to its longest output."""

    name = "transformers"

    def __init__(self, card: ModelCard, dtype: torch.dtype) -> None:
        self.model = load(card, dtype)

    def prepare(self) -> None:
        gc.collect()

    def run(self, jobs: Sequence[Job], batch: int) -> list[list[int]]:
        return exact(self.name, jobs, [ids for part in static_batches(jobs, batch) for ids in self._batch(part)])

    def _batch(self, jobs: Sequence[Job]) -> list[list[int]]:
        import torch
        from transformers import GenerationConfig

        config_of: Any = GenerationConfig  # it has no annotations
        width, new = max(len(job.prompt) for job in jobs), max(job.output for job in jobs)
        ids = torch.zeros(len(jobs), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        config = config_of(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
        self.model.generation_config = config  # the model's own would fill in what is None here, its end of sequence too
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, generation_config=config)
        return [out[row, width : width + job.output].tolist() for row, job in enumerate(jobs)]


def load(card: ModelCard, dtype: torch.dtype) -> Any:
    """The checkpoint in transformers' own class. Raises CheckpointError for what it does not read."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if card.format == "safetensors":
        folder = card.path if card.path.is_dir() else card.path.parent
    elif card.format == "gguf":
        folder, options = card.path.parent, {"gguf_file": card.path.name, **unpacked()}
    else:
        raise CheckpointError(
            f"{card.path}: transformers cannot be compared on a checkpoint read as {card.format!r}; on safetensors and gguf"
        )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"transformers cannot load {card.path}: {error}") from error
    if other := {str(p.dtype) for p in model.parameters() if p.dim() == 2} - {str(dtype)}:
        raise CheckpointError(
            f"transformers holds matrices of {card.path} as {', '.join(sorted(other))}, not as {dtype}: not the same work"
        )
    return model.eval()


def unpacked() -> dict[str, Any]:
    """Options that make transformers unpack a GGUF file: it would keep blocks where it finds a kernel that multiplies by them."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # older releases always unpack
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def exact(engine: str, jobs: Sequence[Job], outputs: list[list[int]]) -> list[list[int]]:
    """`outputs`, if they are as many and as long as asked; a throughput of anything else would mean nothing."""
    for index, (job, ids) in enumerate(zip(jobs, outputs, strict=True)):
        if len(ids) != job.output:
            raise ModelRunnerError(f"{engine} gave {len(ids)} tokens for request {index}, which asked for {job.output}")
    return outputs


def warm_up(jobs: Sequence[Job]) -> list[Job]:
    """The same jobs cut to a few tokens of output."""
    return [Job(job.prompt, min(job.output, WARM_UP_TOKENS)) for job in jobs]


def versions() -> dict[str, str]:
    """Versions of what a measurement depends on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("modelrunner", "torch", "transformers")}
