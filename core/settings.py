"""Settings: what the user asked for, as one frozen tree.

    settings = load_settings({"model": "some/model", "max_num_seqs": 64, "cache": {"page_size": 32}})
    settings.scheduler.max_rows        # 64

Precedence: arguments, then environment variables (`MODELRUNNER_CACHE__PAGE_SIZE=32`), then a TOML file (`config_file`, or the file that
`MODELRUNNER_CONFIG` names), then the defaults below. Settings of plugins stand under `plugin.<name>`. `ALIASES` lists flat names that every
source takes too. What was worked out from the settings (page count, chosen components) is not here but in `modelrunner.resolved`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from modelrunner.errors import SettingsError
from modelrunner.resolved import Resolved
from modelrunner.settings_sources import ALIASES, Layer, LayerSource, explain_validation, field_names, origins, read_layers

__all__ = [
    "ALIASES",
    "CacheSettings",
    "DeviceSettings",
    "GrammarSettings",
    "GraphSettings",
    "LinearSettings",
    "MediaSettings",
    "ModelSettings",
    "PinSettings",
    "ProcessSettings",
    "Resolved",
    "RunnerSettings",
    "SamplerSettings",
    "SchedulerSettings",
    "Section",
    "SpeculationSettings",
    "load_settings",
    "merge_sections",
    "setting_origins",
    "settings_class",
]

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
    """The same for a step in which at least four requests decode for each pending prompt, so that a long prompt does not hold them up. It
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


class SamplerSettings(Section):
    """Capacities of the sampler's columns."""

    max_stop_token_ids: int = Field(default=64, ge=1, le=4096)
    """Most stop token ids of one request, the model's own end-of-sequence ids included."""

    stop_seats: int | None = Field(default=None, ge=1, le=65536)
    """Active requests that can have stop token ids at the same time; none is scheduler.max_rows."""

    max_logit_bias: int = Field(default=512, ge=1, le=65536)
    """Most ids in the logit_bias of one request."""

    logit_bias_seats: int | None = Field(default=None, ge=0, le=65536)
    """Active requests that can have a logit_bias at the same time; none is scheduler.max_rows. A seat costs 8 bytes an id."""

    allow_list_seats: int | None = Field(default=None, ge=0, le=65536)
    """Active requests that can have allowed_token_ids at the same time; none is scheduler.max_rows. A seat costs a bit for each id of
    the vocabulary."""

    max_bad_words: int = Field(default=128, ge=1, le=65536)
    """Most sequences of tokens in the bad_words of one request; a word is two where a leading space changes its tokens."""

    max_bad_word_tokens: int = Field(default=8, ge=1, le=256)
    """Most tokens of a bad word."""

    bad_word_seats: int | None = Field(default=None, ge=0, le=65536)
    """Active requests that can have bad_words at the same time; none is scheduler.max_rows. A seat costs 4 bytes a token."""

    penalty_seats: int | None = Field(default=None, ge=0, le=65536)
    """Active requests that can have penalties at the same time; none is scheduler.max_rows, but no more than fit into 128 MiB. A seat
    costs 4 bytes for each id of the vocabulary, on the device."""

    max_logprobs: int = Field(default=20, ge=-1, le=256)
    """Most log-probs that a request may ask for beside that of its own token, at each position; -1 sets no limit, and lets a request ask
    for -1, the whole vocabulary. Steps with a request for more than 20 run without a graph then, and copy 4 bytes to the host for each
    id of the vocabulary, for each of its tokens."""

    logprobs_mode: Literal["raw", "processed"] = "raw"
    """What log-probs tell: raw is what the model gave, processed what the token was drawn from, after penalties, bans, temperature and
    filters. Those of prompts are always raw."""

    @field_validator("logprobs_mode", mode="before")
    @classmethod
    def _short_mode(cls, mode: Any) -> Any:
        """Accept vLLM's names too."""
        return mode.removesuffix("_logprobs") if isinstance(mode, str) else mode


class GrammarSettings(Section):
    """Structured output."""

    compile_limit: float = Field(default=10.0, gt=0)
    """Seconds that a request waits for its grammar to be compiled; then it ends with an error. Loading the backend is not counted."""

    compile_threads: int = Field(default=2, ge=1, le=64)
    """Grammars that are compiled at the same time, beside the engine's loop."""

    kept_grammars: int = Field(default=64, ge=1, le=65536)
    """Compiled grammars that are remembered for later requests, the newest ones."""

    max_bytes: int = Field(default=262144, ge=1, le=2**24)
    """Most bytes of one request's schema, expression, grammar or list of choices."""

    max_whitespace: int = Field(default=16, ge=0, le=4096)
    """Most white space in a row between the parts of a JSON document; 0 allows none but a space after a comma or a colon."""

    fill_seconds: float = Field(default=0.005, gt=0)
    """Seconds for which a turn of the loop makes masks while a step runs; requests whose masks are not made then wait for a later step."""

    automaton_memory: int = Field(default=128, ge=0, le=65536)
    """MiB of device memory for grammars that are small automata, whose rows the host need not follow; 0 follows all rows on the host. A
    state takes a bit for each id of the vocabulary and 514 bytes."""

    automaton_states: int = Field(default=2048, ge=1, le=32767)
    """Most states of one such automaton; a grammar that takes more is followed on the host."""


class MediaSettings(Section):
    """Images, videos and embeddings in prompts."""

    arena_tokens: int | None = Field(default=None, ge=1, le=2**24)
    """Embeddings that the encoder's arena holds; none is the most that one image or video of the model can have, or a step's tokens for
    prompt embeddings of a model of text. Each takes the bytes of a hidden state, or several of them."""

    encoder_tokens: int = Field(default=4096, ge=1, le=2**24)
    """Most embeddings that are encoded together; an image that has more is encoded by itself."""

    encoder_duty: float = Field(default=1.0, gt=0, le=1)
    """Share of the time in which something is encoded while other requests decode: with 0.5 encoding pauses for as long as it took. Less
    makes their tokens come faster, and images later."""

    prompt_embeds: bool = False
    """Accept embeddings as prompts (`prompt_embeds`)."""

    max_images: int = Field(default=16, ge=0, le=4096)
    """Most images of one request."""

    max_videos: int = Field(default=2, ge=0, le=4096)
    """Most videos of one request."""

    max_pixels: int = Field(default=2**25, ge=1, le=2**31)
    """Most pixels of an image as it is given; those of a video's frames together, the chosen ones, may be 16 times as many. Larger ones
    are refused before they are decoded."""

    max_bytes: int = Field(default=2**26, ge=1, le=2**32)
    """Most bytes of an image or a video file, encoded."""

    max_frames: int = Field(default=256, ge=1, le=65536)
    """Most frames that are taken out of a video file, spread evenly."""

    video_fps: float = Field(default=2.0, gt=0, le=240)
    """Frames a second that are taken out of a video file."""

    folder: str | None = None
    """Folder whose files prompts may name (file:// URLs and paths); none refuses all files."""

    remote: bool = False
    """Fetch http and https URLs that prompts name."""

    fetch_timeout: float = Field(default=10.0, gt=0)
    """Seconds that fetching a URL may take."""

    threads: int = Field(default=4, ge=1, le=256)
    """Images and videos of one call that are processed at the same time, beside the engine's loop."""


class SpeculationSettings(Section):
    """Speculative decoding: a drafter proposes tokens, the model checks several at once."""

    drafter: str | None = None
    """Name of the drafter offer (ngram, or a plugin's); none decodes a token at a time."""

    num_tokens: int = Field(default=3, ge=1, le=16)
    """Most tokens that are proposed for a request in a step; a request may ask for fewer (num_draft_tokens)."""

    model: str = ""
    """Hub id or folder of the drafter's weights; empty for a drafter without, or one whose weights lie with the model's."""

    off_above_rows: int | None = Field(default=None, ge=0, le=65536)
    """Decoding requests above which nothing is proposed, because the device is busy enough; none always proposes."""

    adaptive: bool = False
    """Choose step by step how many tokens are proposed, up to num_tokens, by how many were accepted lately and how many requests decode."""

    spare_tokens: int = Field(default=256, ge=1, le=65536)
    """With adaptive, tokens up to which a step is taken to last as long as one of few."""

    acceptance: Literal["exact", "typical"] = "exact"
    """`exact` changes no token's distribution. `typical` also keeps drafts that are likely enough where a request draws (temperature above
    0): faster, and lossy (see typical_threshold)."""

    typical_threshold: float = Field(default=0.3, gt=0, le=1)
    """Of acceptance `typical`: a draft of probability p is kept if p > min(typical_threshold, typical_factor * exp(-entropy)), in nats, of
    the distribution after temperature and filters (Cai et al. 2024, arXiv:2401.10774, section 3.3.1)."""

    typical_factor: float = Field(default=0.09, gt=0, le=1)
    """See typical_threshold."""


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

    max_tokens: int = Field(default=2048, ge=0, le=8192)
    """Most query tokens of a captured step with prompts; larger ones run without a graph, and 0 captures only steps in which all rows
    decode."""

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


class PluginSections(Section):
    """Sections that plugins declare, by section name."""


S = TypeVar("S", bound=Section)
Sections = Mapping[str, type[Section]]


class RunnerSettings(BaseSettings):
    """All settings. Frozen and picklable; creating one reads the environment and the settings file.

    Keyword arguments are sections (`cache={"page_size": 32}` or a `CacheSettings`) or flat names of `ALIASES`; `load_settings` takes dotted
    names too.
    Raises SettingsError, which names the setting, the value, and the source that gave it.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True)
    sections: ClassVar[Sections] = {}

    model: ModelSettings = ModelSettings()
    """The model and how it is loaded."""
    cache: CacheSettings = CacheSettings()
    """The paged memory that holds what earlier tokens left behind."""
    scheduler: SchedulerSettings = SchedulerSettings()
    """What runs in a step."""
    device: DeviceSettings = DeviceSettings()
    """Where steps run."""
    linear: LinearSettings = LinearSettings()
    """How the weights of linear layers are stored and applied."""
    sampler: SamplerSettings = SamplerSettings()
    """Capacities of the sampler's columns."""
    grammar: GrammarSettings = GrammarSettings()
    """Structured output."""
    media: MediaSettings = MediaSettings()
    """Images, videos and embeddings in prompts."""
    speculation: SpeculationSettings = SpeculationSettings()
    """Speculative decoding."""
    graphs: GraphSettings = GraphSettings()
    """Captured graphs and the batch shapes that they are padded to."""
    process: ProcessSettings = ProcessSettings()
    """The engine process behind AsyncLLM."""
    pin: PinSettings = PinSettings()
    """Offers taken by name."""
    plugin: PluginSections = PluginSections()
    """Sections that plugins declare."""

    def __init__(self, **arguments: Any) -> None:
        try:
            super().__init__(**arguments)
        except ValidationError as error:
            raise explain_validation(error, _layers(type(self), arguments)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        layers = _layers(cls, init_settings())
        return tuple(LayerSource(settings_cls, layer) for layer in layers)

    def section(self, kind: type[S]) -> S:
        """The section of class `kind`, a plugin's or a built-in one."""
        for owner in (self.plugin, self):
            for name in type(owner).model_fields:
                if isinstance(found := getattr(owner, name), kind):
                    return found
        raise SettingsError(
            f"no section of class {kind.__name__}; plugins declared {sorted(self.sections) or 'none'} (hook settings_sections)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (
            dict(self.sections),
            {name: getattr(self, name) for name in type(self).model_fields if name != "plugin"},
            dict(self.plugin),
        )


_CONTROLS = ("config_file", "environ")


def _layers(root: type[RunnerSettings], arguments: Mapping[str, Any]) -> list[Layer]:
    """The layers for `arguments`, two of which say where to read: config_file, and environ (a mapping instead of os.environ)."""
    values = {name: value for name, value in arguments.items() if name not in _CONTROLS}
    environ = arguments.get("environ")
    return read_layers(root, values, arguments.get("config_file"), os.environ if environ is None else environ)


def _restore(sections: Sections, values: Mapping[str, Any], plugin: Mapping[str, Any]) -> RunnerSettings:
    """Unpickle without reading the environment again."""
    cls = settings_class(sections)
    tree = cast(type[PluginSections], cls.model_fields["plugin"].annotation)
    return cls.model_construct(**values, plugin=tree.model_construct(**plugin))


def settings_class(sections: Sections = MappingProxyType({})) -> type[RunnerSettings]:
    """The settings class with the plugin sections `sections` (name -> class). Equal sections give the same class."""
    return _settings_class(tuple(sorted(sections.items()))) if sections else RunnerSettings


@lru_cache(maxsize=64)
def _settings_class(items: tuple[tuple[str, type[Section]], ...]) -> type[RunnerSettings]:
    fields: dict[str, Any] = {}
    for name, kind in items:
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            raise SettingsError(f"plugin settings section {name!r} is {kind!r}; it must be a subclass of modelrunner.settings.Section")
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
            raise SettingsError(
                f"plugin settings section {name!r}: the name must be small letters, digits and single underscores, e.g. my_plugin"
            )
        try:
            fields[name] = (kind, kind())
        except ValidationError as error:
            raise SettingsError(
                f"plugin settings section {name!r} ({kind.__module__}.{kind.__qualname__}): every field needs a valid default; {error}"
            ) from None
    tree = create_model("PluginSections", __base__=PluginSections, __module__=__name__, **fields)
    cls = create_model("RunnerSettings", __base__=RunnerSettings, __module__=__name__, plugin=(tree, tree()))
    cls.sections = dict(items)
    return cls


def merge_sections(answers: Iterable[tuple[str, Sections | None]]) -> dict[str, type[Section]]:
    """The answers of the hook `settings_sections`, as (plugin, answer), in one mapping. Two plugins with one section name are refused."""
    merged: dict[str, type[Section]] = {}
    owners: dict[str, str] = {}
    for plugin, sections in answers:
        for name, kind in (sections or {}).items():
            if name in merged and merged[name] is not kind:
                raise SettingsError(f"plugins {owners[name]} and {plugin} both declare the settings section {name!r}; disable one of them")
            merged[name] = kind
            owners[name] = plugin
    return merged


def load_settings(
    arguments: Mapping[str, Any] | None = None,
    *,
    sections: Sections | None = None,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> RunnerSettings:
    """The effective settings.

    arguments: nested mappings, `Section` objects, dotted names ("cache.page_size") or flat names of `ALIASES`, in any mixture; a setting
    given twice is refused. They may name `config_file` too. sections: what plugins declare. config_file: a TOML file, instead of the one
    that MODELRUNNER_CONFIG names. environ: read instead of os.environ. Raises SettingsError.
    """
    return settings_class(sections or {})(**_with_controls(arguments or {}, config_file, environ))


def setting_origins(
    arguments: Mapping[str, Any] | None = None,
    *,
    sections: Sections | None = None,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Where `load_settings`, called alike, took each setting from: {dotted name: source}; those left at their default are absent."""
    layers = _layers(settings_class(sections or {}), _with_controls(arguments or {}, config_file, environ))
    return {".".join(path): origin for path, origin in origins(layers).items()}


def _with_controls(arguments: Mapping[str, Any], config_file: str | Path | None, environ: Mapping[str, str] | None) -> dict[str, Any]:
    if config_file is not None and arguments.get("config_file") is not None:
        raise SettingsError("config_file is given twice; keep one of them")
    controls = {"config_file": config_file, "environ": environ}
    return {**arguments, **{name: value for name, value in controls.items() if value is not None}}
