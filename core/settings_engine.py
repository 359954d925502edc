"""Sections of the settings about what the engine is made of and how it runs: the model, its memory, steps, devices, chosen offers.

`modelrunner.settings` puts them into one tree, and is where to import them from.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from modelrunner.errors import SettingsError
from modelrunner.settings_sources import field_names

_CACHE_SYNONYMS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
_DTYPE_SYNONYMS = {"half": "float16", "float": "float32", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}


def _dtype_name(value: Any) -> Any:
    """Accept torch's own dtype objects and the usual short names."""
    name = str(value).removeprefix("torch.")
    return _DTYPE_SYNONYMS.get(name, name)


def _cache_dtype_name(value: Any) -> Any:
    """The same for what a cache may hold."""
    return _CACHE_SYNONYMS.get(name := _dtype_name(value), name)


CacheDTypeName = Annotated[Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"], BeforeValidator(_cache_dtype_name)]
DTypeName = Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_dtype_name)]


class Section(BaseModel):
    """Base of every section, also of the ones that plugins declare: frozen, no unknown names, the sentence under a field is its help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class ModelSettings(Section):
    """The model and how it is loaded."""

    name: str = ""
    """Hub id, folder or GGUF file of the model; empty asks the installed plugins for a default model."""

    dtype: DTypeName = "auto"
    """Type of weights and activations; auto is float32 on a CPU and bfloat16 on CUDA."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of a request, prompt and output together; none takes what the model was made for."""

    load_format: Literal["auto", "safetensors", "gguf", "torch", "dummy"] = "auto"
    """Format of the weights; auto looks at the files, dummy fills the weights with seeded random numbers and reads none."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of dummy weights and of whatever else the engine draws; a request's own seed stands in its sampling parameters."""

    tokenizer: str | None = None
    """Hub id or folder of the tokenizer; none takes the model's own."""

    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, outputs have no text, stop strings are refused."""

    revision: str | None = None
    """Branch, tag or commit on the hub; none takes the default branch."""


class CacheSettings(Section):
    """The paged memory that holds what earlier tokens left behind."""

    page_size: int = Field(default=16, ge=1, le=4096)
    """Tokens in a page of the cache group that takes the most bytes a token; the other groups' pages have as many bytes."""

    dtype: CacheDTypeName = "auto"
    """Type of the cached keys and values; auto is the model's type, fp8 is short for float8_e4m3fn, which takes scales."""

    scales: str | None = None
    """Safetensors file of the scales of a float8_e4m3fn cache, as `LLM.calibrate_cache` gives them; none takes the checkpoint's, or 1 if
    that has none."""

    num_pages: int | None = Field(default=None, ge=1, lt=2**31)
    """Pages in the cache; none works the number out from memory_bytes or memory_fraction."""

    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of the device's memory that the engine may fill, weights included, between 0 and 1."""

    memory_bytes: int | None = Field(default=None, ge=1)
    """Bytes of the cache; none leaves the decision to memory_fraction."""

    prefix_caching: bool = True
    """Keep full pages of finished requests, and reuse them for prompts that begin with the same tokens."""


class SchedulerSettings(Section):
    """What runs in a step."""

    max_rows: int = Field(default=256, ge=1, le=65536)
    """Most requests that are active at once."""

    max_batched_tokens: int = Field(default=2048, ge=1, le=2**20)
    """Most tokens that one step computes, over all requests."""

    max_mixed_tokens: int = Field(default=512, ge=1, le=2**20)
    """The same for a step in which at least 16 requests decode for each pending prompt, so that a long prompt does not hold them up. It
    grows in proportion beside more than 64 that read more than six times the weights' bytes of the cache; half of it goes to prompts in any
    case, and without chunked_prefill it has no effect."""

    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of admission: fcfs is first come, first served; priority takes the lowest priority number first, then the first come."""

    chunked_prefill: bool = True
    """Split prompts that do not fit into a step's token budget over several steps."""

    pipeline_depth: int = Field(default=2, ge=1, le=8)
    """Steps in flight between launch and collect; 1 is the plain loop."""


class DeviceSettings(Section):
    """Where steps run."""

    name: str = Field(default="auto", min_length=1)
    """Name of a device offer (cpu, cuda, deferred_cpu, or a plugin's); auto takes the best that is present."""

    deterministic: bool = False
    """A request's tokens and log-probs depend, bit for bit, on nothing but itself: not on the batch, chunks of its prompt, preemption or
    what the cache holds. Slower; on cuda."""


class LinearSettings(Section):
    """How the weights of linear layers are stored and applied."""

    scheme: str = Field(default="auto", min_length=1)
    """Name of a linear scheme offer (plain, packed, int8, or a plugin's); auto is packed for float weights on an x86 CPU, else plain."""


class GraphSettings(Section):
    """Captured graphs and the batch shapes that they are padded to."""

    eager: bool = False
    """Never capture graphs."""

    bucket_rows: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of rows that batches are padded to, rising; empty takes a list up to scheduler.max_rows where graphs are captured, and else
    pads nothing."""

    bucket_tokens: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of query tokens that batches with prompts are padded to, rising; empty lets max_tokens decide where graphs are captured, and
    else pads nothing."""

    max_tokens: int = Field(default=4096, ge=0, le=8192)
    """Most query tokens of a captured step with prompts; larger ones, and those with more than 2048 of one prompt, run without a graph,
    and 0 captures only steps in which all rows decode."""

    @field_validator("bucket_rows", "bucket_tokens")
    @classmethod
    def _rising(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(set(sizes)):
            raise ValueError("the sizes must rise, each given once, e.g. 1, 2, 4, 8")
        return sizes


class ProcessSettings(Section):
    """The engine process behind AsyncLLM."""

    stall_limit: float = Field(default=60.0, gt=0)
    """Seconds without a token, while requests are open, or without a word, while there are none, after which the engine is not healthy."""


class PinSettings(Section):
    """Offers taken by name, one field for each hook that asks for offers; none lets the core choose by fit."""

    model_source: str | None = None
    """Name of the offer that finds the model's files; none chooses by fit."""

    checkpoint_readers: str | None = None
    """Name of the offer that reads the checkpoint; none chooses by fit."""

    model_config_: str | None = Field(default=None, alias="model_config")
    """Name of the offer that states the model's configuration; none chooses by fit."""

    tokenizer: str | None = None
    """Name of the offer that supplies the tokenizer; none chooses by fit."""

    model_state: str | None = None
    """Name of the offer that runs the model; none chooses by fit."""

    device: str | None = None
    """Name of the offer that is the device; none lets device.name decide."""

    attention_backend: str | None = None
    """Name of the offer that runs attention; none chooses by fit."""

    linear_scheme: str | None = None
    """Name of the offer that stores linear weights; none lets linear.scheme decide."""

    grammar_backend: str | None = None
    """Name of the offer that compiles grammars; none chooses by fit."""

    drafter: str | None = None
    """Name of the offer that drafts; none lets speculation.drafter decide."""

    def of(self, hook: str) -> str | None:
        """The name pinned for `hook`. (The field for the hook `model_config` has another name in Python: pydantic keeps that one.)"""
        if hook not in field_names(type(self)):
            raise SettingsError(f"no pin for {hook!r}; hooks that can be pinned are {', '.join(field_names(type(self)))}")
        pinned: str | None = getattr(self, field_names(type(self))[hook])
        return pinned
