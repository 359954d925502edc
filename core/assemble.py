"""Start-up: ask the plugins, choose, load, and put an engine's parts together.

The order is that of `hookspecs.HookSpecs`. Every function here runs once an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelrunner.attention import AttentionBackend, NoAttention
from modelrunner.automaton_arena import AutomatonArena
from modelrunner.cache_scales import CacheScales
from modelrunner.cache_setup import CacheMaker, check_budget
from modelrunner.caches import Arena, stored_type
from modelrunner.checkpoint import CheckpointReader, ModelCard
from modelrunner.choosing import Chooser, blaming, build_context, expect, open_checkpoint, require_deterministic
from modelrunner.device import Device
from modelrunner.drafter_setup import DrafterSetup, set_up_drafter, warn_of_unused
from modelrunner.errors import CapacityError, PluginError, SettingsError
from modelrunner.grammar import GrammarBackend, vocabulary
from modelrunner.graphs import capture_problem, decode_buckets, token_buckets, uncapturable
from modelrunner.guides import COLUMN, Guides
from modelrunner.media_setup import FIRST_EMBEDDINGS, MediaParts, open_media
from modelrunner.media_steps import DELTA
from modelrunner.model_state import CacheGroup, ModelState, Needs, No, Yes, answer_of, required_features
from modelrunner.observers import Observer
from modelrunner.ops import Ops, Registry
from modelrunner.page_pool import GroupLayout, page_layout
from modelrunner.plugin_contract import flatten
from modelrunner.plugin_manager import PluginManager
from modelrunner.request import merged_eos
from modelrunner.request_table import RUN_OVERHEAD, Column, RequestTable
from modelrunner.runner import Runner
from modelrunner.runner_parts import Drafting, Parts
from modelrunner.sampler import Functions, ProcessorRegistry, Processors, Sampler, default_stages
from modelrunner.settings import Resolved, RunnerSettings, load_settings, merge_sections
from modelrunner.step_buffers import Buckets
from modelrunner.tap_set import StateOutputs, TapSet, refuse_twice
from modelrunner.taps import ModelInfo, Tap
from modelrunner.text import Tokenizer
from modelrunner.weights import WeightMap, load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn}
DEFAULT_DTYPE = {"cpu": "float32"}  # others: bfloat16


def settle(arguments: Mapping[str, Any], manager: PluginManager) -> RunnerSettings:
    """The effective settings, with the sections that the plugins declare."""
    settings = load_settings(arguments, sections=merge_sections(manager.collect("settings_sections")))
    warn_of_unused(settings)
    return settings


@dataclass(frozen=True)
class Assembly:
    """An engine's parts, ready to run."""

    manager: PluginManager
    settings: RunnerSettings
    resolved: Resolved
    card: ModelCard
    tokenizer: Tokenizer | None
    device: Device
    needs: Needs
    state: ModelState
    sampler: Sampler
    taps: TapSet
    guides: Guides
    table: RequestTable
    layouts: tuple[GroupLayout, ...]
    arena: Arena
    scales: CacheScales
    runner: Runner
    observers: list[tuple[str, Observer]]
    media: MediaParts


@dataclass(frozen=True)
class Opened:
    """A model that was chosen, declared its needs and has its weights, before memory is taken for anything else. needs: the model's own."""

    manager: PluginManager
    settings: RunnerSettings
    choose: Chooser
    card: ModelCard
    tokenizer: Tokenizer | None
    device: Device
    ops: Ops
    dtype: torch.dtype
    state: ModelState
    needs: Needs
    scales: CacheScales
    max_model_len: int
    setup: DrafterSetup | None

    @property
    def info(self) -> ModelInfo:
        """The model as plugins of taps and processors are told of it."""
        needs = self.needs
        tap_points = needs.tap_points if isinstance(answer_of(self.state, "taps"), Yes) else ()
        sizes = (needs.hidden_size, needs.vocab_size, self.max_model_len)
        return ModelInfo(self.card, self.settings, tap_points, *sizes, self.dtype, self.device.torch_device)


def open_model(arguments: Mapping[str, Any], plugins: Sequence[object]) -> Opened:
    """Ask the plugins, let the model declare its needs, and read its weights, and those of a drafter."""
    manager = PluginManager.load(plugins)
    settings = settle(arguments, manager)
    manager.warn_failures()
    choose = Chooser(manager, settings)
    reader, card = open_checkpoint(choose)
    tokenizer = None if settings.model.skip_tokenizer_init else choose("tokenizer", card=card, settings=settings)
    device: Device = choose("device", setting="device.name", settings=settings)(settings)
    require_deterministic(settings, device, f"device {device.name!r}", "device.name")
    ops = resolve_ops(manager, device)
    dtype = model_dtype(settings, device)
    state_type: type[ModelState] = choose("model_state", card=card, settings=settings)
    cache_dtype = cache_type(settings, dtype)
    with blaming(f"model_state {choose.chosen['model_state']}", choose.passed_over["model_state"]):
        state = state_type(card, settings)
        needs = checked_needs(state, card, settings)
        check_cache(settings, device, needs, dtype)
        scales = CacheScales(needs.cache_groups, cache_dtype, device.torch_device)
    max_model_len = min(settings.model.max_model_len or needs.max_model_len, needs.max_model_len)
    setup = set_up_drafter(choose, card, state, needs, max_model_len)
    with blaming(f"model_state {choose.chosen['model_state']}", choose.passed_over["model_state"]):
        build_module(choose, reader, card, state, dtype, device, ops, scales)
    if setup is not None:
        setup.build(state, reader, card, tokenizer, dtype, device, ops)
        scales.by_group.update(CacheScales(setup.needs.cache_groups, cache_dtype, device.torch_device).by_group)
    return Opened(manager, settings, choose, card, tokenizer, device, ops, dtype, state, needs, scales, max_model_len, setup)


def assemble(arguments: Mapping[str, Any], plugins: Sequence[object] = ()) -> Assembly:
    """Build everything from settings. Raises a ModelRunnerError that says what was missing or did not fit."""
    model = open_model(arguments, plugins)
    manager, settings, choose, device, state, setup = model.manager, model.settings, model.choose, model.device, model.state, model.setup
    max_model_len, scales = model.max_model_len, model.scales
    taps, needs = collect_taps(manager, model.info, state, model.needs)
    processors = collect_processors(manager, model.info)
    if setup is not None:
        needs = setup.join(needs)
    with blaming(f"sharing pages between the cache groups of {owners_of_needs(choose)}"):
        page_bytes, layouts = pages_of(needs, settings, model.dtype, {} if setup is None else setup.riders(needs))
    attending = {group.name: attention_backend(choose, group, device, scales) for layout in layouts for group in layout.groups}
    guides = make_guides(choose, model.card, model.tokenizer, needs.vocab_size, model.ops, device)
    sampler = make_sampler(settings, processors, guides, model.ops)
    cache_dtype = cache_type(settings, model.dtype)
    maker = CacheMaker(device, model.ops, settings, layouts, page_bytes, model.dtype, cache_dtype, attending, max_model_len, scales)
    cache, memory = maker.make_first(), ""
    with blaming(f"the arena of media of model_state {choose.chosen['model_state']}"):
        shifted = setup is not None and setup.needs.shifted
        media = open_media(state, needs, settings, device, model.dtype, model.tokenizer, max_model_len, shifted)
    table = make_table(model, needs, layouts, sampler, taps, media, masks=not guides.problem)
    built = (device, model.ops, state, needs, model.dtype, sampler, table, layouts, cache.views, cache.backends, taps, media.arena)
    with blaming(f"the runner with the buffers of a step of {owners_of_needs(choose)}"):
        runner = make_runner(Parts(*built, drafting_of(setup, cache.backends, layouts)), settings, max_model_len)
    with blaming(f"the first step of model_state {choose.chosen['model_state']}"):
        if media.encodes:
            media.try_out(FIRST_EMBEDDINGS)
        runner.warm_up()
        if maker.measured:
            cache, use = maker.enlarge(runner, media.try_out if media.encodes else None)
            memory = str(use)
        graphs = runner.capture()
    resolved = Resolved(
        model=model.card.name or str(model.card.path),
        dtype=name_of(model.dtype),
        cache_dtype=name_of(cache_dtype),
        max_model_len=max_model_len,
        num_pages=cache.num_pages,
        page_bytes=page_bytes,
        tokens_per_page={layout.group.name: layout.tokens_per_page for layout in layouts},
        components=choose.chosen,
        graphs=str(graphs),
        memory=memory,
        automata="" if guides.arena is None else str(guides.arena),
        encoder=device.pacing() if media.encodes and media.encoder is not None and media.encoder.shares else "",
    )
    observers = collect_objects(manager, "observer", settings=settings)
    parts_of = (manager, settings, resolved, model.card, model.tokenizer, device, needs, state, sampler, taps, guides)
    return Assembly(*parts_of, table, tuple(layouts), cache.arena, scales, runner, observers, media)


def make_sampler(settings: RunnerSettings, processors: Processors, guides: Guides, ops: Ops) -> Sampler:
    """The stages that choose tokens, in their order."""
    own = settings.speculation
    typical = (own.typical_threshold, own.typical_factor) if own.acceptance == "typical" else None
    return Sampler(ops, default_stages(processors, Functions(), arena=guides.arena), typical)


def owners_of_needs(choose: Chooser) -> str:
    """Who declared what the core allocates, for messages."""
    return " and ".join(f"{hook} {choose.chosen[hook]}" for hook in ("model_state", "drafter") if hook in choose.chosen)


def make_table(
    model: Opened, needs: Needs, layouts: Sequence[GroupLayout], sampler: Sampler, taps: TapSet, media: MediaParts, masks: bool
) -> RequestTable:  # fmt: skip
    """The request table with everybody's columns. needs: of the model, its taps and the drafter. masks: of grammars may be among a step's
    edits. Raises PluginError, with both owners, for a name that two columns have."""
    settings, setup, own = model.settings, model.setup, len(model.needs.columns)
    owned: list[tuple[str, Sequence[Column]]] = [
        ("the engine", core_columns(layouts, model.max_model_len)),
        ("the sampler", sampler.columns(settings, needs.vocab_size)),
        (f"model_state {model.choose.chosen['model_state']}", needs.columns[:own]),
        (f"the taps {', '.join(repr(tap.name) for tap in taps.taps)}", needs.columns[own:]),
        ("the engine", [DELTA] if media.front.facts.position_rows > 1 and media.encoder is not None else ()),
        *(() if setup is None else ((f"drafter {setup.name}", setup.columns),)),
    ]
    refuse_twice([(owner, f"the column {column.name!r}") for owner, columns in owned for column in columns])
    columns = [column for _, declared in owned for column in declared]
    with blaming(f"the request table with the columns of {owners_of_needs(model.choose)}"):
        capacity = patch_capacity(settings, layouts, columns, masks=masks)
        return RequestTable(columns, settings.scheduler.max_rows, model.device.torch_device, capacity)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention_backend(choose: Chooser, group: CacheGroup, device: Device, scales: CacheScales) -> type[AttentionBackend]:
    """The class that attends over a cache group. Raises PluginError when it cannot read the type of the group's cache."""
    if not group.attends:
        return NoAttention
    chosen: type[AttentionBackend] = choose("attention_backend", group=group, device=device, settings=choose.settings)
    if group.name in scales.by_group and not chosen.takes_scales:
        raise PluginError(
            f"cache.dtype is {choose.settings.cache.dtype!r}, but attention_backend {choose.chosen['attention_backend']} applies no scales "
            f"(its class {chosen.__name__} has takes_scales = False). Set cache.dtype=auto, or pin.attention_backend=paged"
        )
    require_deterministic(choose.settings, chosen, f"attention backend {choose.chosen['attention_backend']}", "pin.attention_backend")
    return chosen


def drafting_of(setup: DrafterSetup | None, backends: Mapping[str, AttentionBackend], layouts: Sequence[GroupLayout]) -> Drafting | None:
    """The drafter as a part of the runner. backends: of all cache groups."""
    if setup is None:
        return None
    own = {group.name: backends[group.name] for group in setup.needs.cache_groups}
    problem = setup.needs.capture_reason if setup.needs.capture == "none" else uncapturable(own)
    tables = tuple(layout.name for layout in layouts if any(group.name in own for group in layout.groups))
    return Drafting(setup.drafter, setup.needs, setup.policy(tables), problem, setup.shared_map, setup.name)


def make_runner(parts: Parts, settings: RunnerSettings, max_model_len: int) -> Runner:
    """The runner, with the buckets that settings and graphs ask for."""
    drafted = () if parts.drafting is None else parts.drafting.groups
    own = {name: backend for name, backend in parts.backends.items() if name not in drafted}
    no_graphs = capture_problem(settings.graphs.eager, parts.device, parts.state, parts.needs, own)
    rows, tokens = settings.scheduler.max_rows, settings.scheduler.max_batched_tokens
    bucket_rows = settings.graphs.bucket_rows or (() if no_graphs else decode_buckets(rows))
    bucket_tokens = settings.graphs.bucket_tokens or (() if no_graphs else token_buckets(min(settings.graphs.max_tokens, tokens)))
    return Runner(
        parts,
        max_rows=rows,
        max_tokens=tokens,
        max_model_len=max_model_len,
        depth=settings.scheduler.pipeline_depth,
        buckets=Buckets(bucket_rows, bucket_tokens, rows),
        no_graphs=no_graphs,
    )


def resolve_ops(manager: PluginManager, device: Device) -> Ops:
    """Collect operations from the `kernels` hook and settle them for the device."""
    registry = Registry()
    manager.call("kernels", register=registry, device=device)
    return registry.resolve(device.type)


def model_dtype(settings: RunnerSettings, device: Device) -> torch.dtype:
    """The type of weights and activations."""
    name = settings.model.dtype
    return DTYPES[DEFAULT_DTYPE.get(device.type, "bfloat16") if name == "auto" else name]


def declared(state: ModelState, card: ModelCard, settings: RunnerSettings) -> Needs:
    """What the state declares. Raises TypeError when that is no Needs."""
    return expect(Needs, state.declare(card, settings), state, "declare")


def checked_needs(state: ModelState, card: ModelCard, settings: RunnerSettings) -> Needs:
    """What the state declares; refuses features that it cannot do and lengths that it cannot hold."""
    needs = declared(state, card, settings)
    if seated := [column.name for column in needs.columns if column.seats is not None]:
        raise ValueError(f"columns {seated} are seated; only sampler stages have seats to give, a model state declares plain columns")
    for what, names in (("columns", [column.name for column in needs.columns]), ("buffers", [buffer.name for buffer in needs.buffers])):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{what} has several of the names {twice}; each may stand there once")
    refused = {feature: answer.reason for feature in required_features(settings) if isinstance(answer := answer_of(state, feature), No)}
    if refused:
        listing = "; ".join(f"{feature}: {reason}" for feature, reason in refused.items())
        raise PluginError(f"{type(state).__name__} cannot do what the settings turn on: {listing}. Turn it off, or pin another model state")
    wanted = settings.model.max_model_len
    if wanted is not None and wanted > needs.max_model_len:
        raise CapacityError(
            f"model.max_model_len is {wanted} tokens, but the model holds at most {needs.max_model_len}; ask for no more than that"
        )
    return needs


def cache_type(settings: RunnerSettings, dtype: torch.dtype) -> torch.dtype:
    """The type of keys and values in the cache. dtype: of activations. Raises SettingsError for scales that this type does not take."""
    name, scales = settings.cache.dtype, settings.cache.scales
    if scales is not None and name != "float8_e4m3fn":
        raise SettingsError(f"cache.scales is {scales!r}, but cache.dtype is {name!r}; scales are for float8_e4m3fn")
    return dtype if name == "auto" else CACHE_DTYPES[name]


def pages_of(
    needs: Needs, settings: RunnerSettings, dtype: torch.dtype, riders: Mapping[str, Sequence[CacheGroup]] | None = None
) -> tuple[int, list[GroupLayout]]:
    """Bytes of a page, and what it holds for each group. dtype: of activations. riders: groups that others have in their pages."""
    cache_dtype, riders = cache_type(settings, dtype), riders or {}
    itemsize = {group.name: stored_type(group, cache_dtype, dtype).itemsize for group in needs.cache_groups}
    riding = {group.name for guests in riders.values() for group in guests}
    owners = [group for group in needs.cache_groups if group.name not in riding]
    return page_layout(owners, settings.cache.page_size, itemsize, riders)


def check_cache(settings: RunnerSettings, device: Device, needs: Needs, dtype: torch.dtype) -> None:
    """Raise CapacityError, before a weight is read, when the bytes that the settings give the cache do not hold two pages."""
    if settings.cache.num_pages is None and settings.cache.memory_bytes is not None:
        check_budget(device, settings.cache.memory_bytes, pages_of(needs, settings, dtype)[0])


def build_module(
    choose: Chooser,
    reader: CheckpointReader,
    card: ModelCard,
    state: ModelState,
    dtype: torch.dtype,
    device: Device,
    ops: Ops,
    scales: CacheScales,
) -> None:
    """Build the state's module with the chosen linear scheme and fill it from the checkpoint, and so the cache's scales."""
    settings = choose.settings
    context = build_context(choose, card, dtype, device, ops)
    state.module = expect(torch.nn.Module, state.build(context), state, "build").eval()
    weight_map = expect(WeightMap, state.weight_map(card), state, "weight_map")
    load_weights(state.module, weight_map, reader, seed=settings.model.seed, through=lambda tensors: scales.passing(tensors, weight_map))
    scales.store()
    if settings.cache.scales is not None:
        scales.read(settings.cache.scales)


def collect_objects(manager: PluginManager, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
    """(plugin, object) of everything that plugins answer `hook` with; warns of plugins that fail."""
    found = [(plugin, item) for plugin, answer in manager.collect(hook, **arguments) for item in flatten(answer)]
    manager.warn_failures()
    return found


def collect_processors(manager: PluginManager, info: ModelInfo) -> Processors:
    """The logits processors that plugins bring."""
    registry = ProcessorRegistry()
    manager.call("logits_processors", register=registry, model_info=info)
    return Processors(registry)


def collect_taps(manager: PluginManager, info: ModelInfo, state: ModelState, needs: Needs) -> tuple[TapSet, Needs]:
    """The taps that plugins bring for this model, and `needs` with those of the taps."""
    found: list[tuple[str, Tap]] = collect_objects(manager, "taps", model_info=info)
    if needs.results:
        found.append((f"the model state {type(state).__name__}", StateOutputs(state, needs.results)))
    with blaming("; ".join(f"tap {tap.name!r} of {plugin}" for plugin, tap in found) or "no tap"):
        taps = TapSet(found, replace(needs, tap_points=info.tap_points))
        columns, buffers = (*needs.columns, *taps.columns(info.settings)), (*needs.buffers, *taps.buffers)
        return taps, replace(needs, columns=columns, buffers=buffers)


def core_columns(layouts: Sequence[GroupLayout], max_model_len: int) -> list[Column]:
    """The columns that every request has.

    token_ids: prompt and output. known: tokens known. computed: tokens in the cache. finished: batch.Finish. limit: tokens at which
    the request ends. generation: tenancy of the row. num_accepted: tokens of the row's last step that count. pages.<group>: block table.
    """
    scalars = [Column(name, torch.int32) for name in ("known", "computed", "finished", "limit", "generation", "num_accepted")]
    tables = [Column(f"pages.{g.group.name}", torch.int32, width=max(2, -(-max_model_len // g.tokens_per_page))) for g in layouts]
    return [Column("token_ids", torch.int32, width=max(2, max_model_len)), *scalars, *tables]


def make_guides(choose: Chooser, card: ModelCard, tokenizer: Tokenizer | None, vocab_size: int, ops: Ops, device: Device) -> Guides:
    """What serves structured output. The backend, and a tokenizer where the engine has none, are loaded when a request needs them."""
    settings = choose.settings
    choice = choose.later("grammar_backend", settings=settings)

    def backend() -> GrammarBackend:
        assert not isinstance(choice, str), "without an offer every request is refused"
        text: Tokenizer = tokenizer or choose("tokenizer", card=card, settings=settings)
        made: GrammarBackend = choice.load()(vocabulary(text, merged_eos(card, text), vocab_size), settings)
        return made

    problem, most = choice if isinstance(choice, str) else "", settings.grammar.automaton_memory << 20
    arena = AutomatonArena(ops, device, vocab_size, most) if most and not problem else None
    return Guides(backend, problem, settings.grammar, vocab_size, arena)


def patch_capacity(settings: RunnerSettings, layouts: Sequence[GroupLayout], columns: Sequence[Column], masks: bool) -> int:
    """Words that a step's edits may take: a new page for each row and each token, and a few admissions that fill every column.

    masks: and a mask for each seat of structured output.
    """
    growth = (1 + RUN_OVERHEAD) * len(layouts) * (settings.scheduler.max_rows + settings.scheduler.max_batched_tokens)
    row = sum(
        (2 if column.seats is None else 4) * (1 if column.on_device else column.width) + 16 for column in columns
    )  # at least `PatchBuilder.row_words`
    seats = sum((column.width + RUN_OVERHEAD) * (column.seats or 0) for column in columns if masks and column.name == COLUMN)
    return growth + 4 * row + seats
