"""Start-up: ask the plugins, choose, load, and put an engine's parts together.

The order is that of `hookspecs.HookSpecs`. Every function here runs once an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from modelrunner.attention import AttentionBackend, NoAttention
from modelrunner.automaton_arena import AutomatonArena
from modelrunner.cache_scales import CacheScales
from modelrunner.cache_setup import CacheMaker, check_budget
from modelrunner.caches import stored_type
from modelrunner.checkpoint import CheckpointReader, ModelCard
from modelrunner.device import Device
from modelrunner.errors import CapacityError, ModelRunnerError, PluginError, SettingsError
from modelrunner.grammar import GrammarBackend, vocabulary
from modelrunner.graphs import capture_problem, decode_buckets, token_buckets
from modelrunner.guides import COLUMN, Guides
from modelrunner.linear import LinearFactory
from modelrunner.model_state import BuildContext, ModelState, Needs, No, Yes, required_features
from modelrunner.observers import Observer
from modelrunner.ops import Ops, Registry
from modelrunner.page_pool import GroupLayout, page_layout
from modelrunner.plugin_choice import Choice, nothing_fits, pin_of
from modelrunner.plugin_contract import flatten
from modelrunner.plugin_manager import PluginManager
from modelrunner.request import merged_eos
from modelrunner.request_table import RUN_OVERHEAD, Column, RequestTable
from modelrunner.runner import Runner
from modelrunner.runner_parts import Parts
from modelrunner.sampler import Functions, ProcessorRegistry, Processors, Sampler, default_stages
from modelrunner.settings import Resolved, RunnerSettings, load_settings, merge_sections
from modelrunner.step_buffers import Buckets
from modelrunner.tap_set import StateOutputs, TapSet
from modelrunner.taps import ModelInfo, Tap
from modelrunner.text import Tokenizer
from modelrunner.weights import WeightMap, load_weights

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn}
DEFAULT_DTYPE = {"cpu": "float32"}  # others: bfloat16


class Chooser:
    """Asks hooks for offers, with the settings' pins, and notes what was chosen."""

    def __init__(self, manager: PluginManager, settings: RunnerSettings) -> None:
        self.manager = manager
        self.settings = settings
        self.chosen: dict[str, str] = {}

    def __call__(self, hook: str, *, setting: str = "", **arguments: Any) -> Any:
        """Load the best offer of `hook`. setting: one that may name an offer too, e.g. `device.name`; `pin.<hook>` comes first."""
        pin, pinned_by = pin_of(self.settings, hook, setting)
        choice = self.manager.choose(hook, pin=pin, pinned_by=pinned_by, **arguments)
        self.chosen[hook] = f"{choice.offer.name} ({choice.plugin})"
        return choice.load()

    def later(self, hook: str, **arguments: Any) -> Choice[Any] | str:
        """The best offer of `hook`, to be loaded when it is needed; if there is none, why. Raises PluginError as `__call__` for others."""
        pin, pinned_by = pin_of(self.settings, hook)
        answers = self.manager.ask(hook, **arguments)
        question = self.manager.question(hook, pin, answers, arguments, pinned_by)
        if pin is None and not question.offers:
            return nothing_fits(question)
        choice = self.manager.choose(hook, pin=pin, pinned_by=pinned_by, **arguments)
        self.chosen[hook] = f"{choice.offer.name} ({choice.plugin})"
        return choice


def settle(arguments: Mapping[str, Any], manager: PluginManager) -> RunnerSettings:
    """The effective settings, with the sections that the plugins declare."""
    return load_settings(arguments, sections=merge_sections(manager.collect("settings_sections")))


def open_checkpoint(choose: Chooser) -> tuple[CheckpointReader, ModelCard]:
    """Find the model's files, read its card, and settle its configuration."""
    model = choose.settings.model
    path = choose("model_source", name=model.name, settings=choose.settings)
    reader: CheckpointReader = choose("checkpoint_readers", setting="model.load_format", path=path)(path, model.name)
    card = reader.card()
    config = choose("model_config", card=card)
    return reader, card.with_config(config)


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
    arena: torch.Tensor
    scales: CacheScales
    runner: Runner
    observers: list[tuple[str, Observer]]


def assemble(arguments: Mapping[str, Any], plugins: Sequence[object] = ()) -> Assembly:
    """Build everything from settings. Raises a ModelRunnerError that says what was missing or did not fit."""
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
    with blaming(f"model_state {choose.chosen['model_state']}"):
        state = state_type(card, settings)
        needs = checked_needs(state, card, settings)
        check_cache(settings, device, needs, dtype)
        scales = CacheScales(needs.cache_groups, cache_dtype, device.torch_device)
        build_module(choose, reader, card, state, dtype, device, ops, scales)
    max_model_len = min(settings.model.max_model_len or needs.max_model_len, needs.max_model_len)
    tap_points = needs.tap_points if isinstance(state.supports("taps"), Yes) else ()
    info = ModelInfo(card, settings, tap_points, needs.hidden_size, needs.vocab_size, max_model_len, dtype, device.torch_device)
    taps, needs = collect_taps(manager, info, state, needs)
    guides = make_guides(choose, card, tokenizer, needs.vocab_size, ops, device)
    sampler = Sampler(ops, default_stages(collect_processors(manager, info), Functions(), arena=guides.arena))
    page_bytes, layouts = pages_of(needs, settings, dtype)
    attending = {layout.group.name: attention_backend(choose, layout, device, scales) for layout in layouts}
    maker = CacheMaker(device, ops, settings, layouts, page_bytes, dtype, cache_dtype, attending, max_model_len, scales)
    cache, memory = maker.make_first(), ""
    columns = [*core_columns(layouts, max_model_len), *sampler.columns(settings, needs.vocab_size), *needs.columns]
    with blaming(f"the request table with the columns of model_state {choose.chosen['model_state']}"):
        capacity = patch_capacity(settings, layouts, columns, masks=not guides.problem)
        table = RequestTable(columns, settings.scheduler.max_rows, device.torch_device, capacity)
    parts = Parts(device, ops, state, needs, dtype, sampler, table, layouts, cache.views, cache.backends, taps)
    with blaming("the runner with the buffers of a step"):
        runner = make_runner(parts, settings, max_model_len)
    with blaming(f"the first step of model_state {choose.chosen['model_state']}"):
        runner.warm_up()
        if maker.measured:
            cache, use = maker.enlarge(runner)
            memory = str(use)
        graphs = runner.capture()
    resolved = Resolved(
        model=card.name or str(card.path),
        dtype=name_of(dtype),
        cache_dtype=name_of(cache_dtype),
        max_model_len=max_model_len,
        num_pages=cache.num_pages,
        page_bytes=page_bytes,
        tokens_per_page={layout.group.name: layout.tokens_per_page for layout in layouts},
        components=choose.chosen,
        graphs=str(graphs),
        memory=memory,
        automata="" if guides.arena is None else str(guides.arena),
    )
    observers = collect_objects(manager, "observer", settings=settings)
    parts_of = (manager, settings, resolved, card, tokenizer, device, needs, state, sampler, taps, guides)
    return Assembly(*parts_of, table, tuple(layouts), cache.arena, scales, runner, observers)


@contextmanager
def blaming(component: str) -> Iterator[None]:
    """Name the component in whatever it raises that is not already one of our errors."""
    try:
        yield
    except ModelRunnerError:
        raise
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        raise CapacityError(
            f"{component} does not fit into the device's memory: take a model, a model.dtype or a linear.scheme with smaller weights, a "
            f"smaller scheduler.max_rows, or free what other programs hold ({first})"
        ) from error
    except Exception as error:
        raise PluginError(f"{component} failed at start-up: {type(error).__name__}: {error}") from error


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention_backend(choose: Chooser, layout: GroupLayout, device: Device, scales: CacheScales) -> type[AttentionBackend]:
    """The class that attends over a cache group. Raises PluginError when it cannot read the type of the group's cache."""
    if not layout.group.attends:
        return NoAttention
    chosen: type[AttentionBackend] = choose("attention_backend", group=layout.group, device=device, settings=choose.settings)
    if layout.group.name in scales.by_group and not chosen.takes_scales:
        raise PluginError(
            f"cache.dtype is {choose.settings.cache.dtype!r}, but attention_backend {choose.chosen['attention_backend']} applies no scales "
            f"(its class {chosen.__name__} has takes_scales = False). Set cache.dtype=auto, or pin.attention_backend=paged"
        )
    require_deterministic(choose.settings, chosen, f"attention backend {choose.chosen['attention_backend']}", "pin.attention_backend")
    return chosen


class MayBeDeterministic(Protocol):
    """A component that says whether a row's results can be made to depend on no other row."""

    deterministic: bool


def require_deterministic(
    settings: RunnerSettings, component: MayBeDeterministic | type[AttentionBackend], what: str, setting: str
) -> None:
    """Raise SettingsError if the mode is on and the component cannot be so. setting: by which another is taken."""
    if settings.device.deterministic and not component.deterministic:
        raise SettingsError(
            f"device.deterministic is set, but with {what} a request's results depend on what runs beside it; take another ({setting}), "
            "or leave the mode off. Those that can: device cuda, attention backend paged, linear schemes plain and int8"
        )


def make_runner(parts: Parts, settings: RunnerSettings, max_model_len: int) -> Runner:
    """The runner, with the buckets that settings and graphs ask for."""
    no_graphs = capture_problem(settings.graphs.eager, parts.device, parts.state, parts.needs, parts.backends)
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


def expect(kind: type[T], value: object, state: ModelState, method: str) -> T:
    """`value` if it is what the method must return. Raises TypeError that names the method."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(state).__name__}.{method} returned {value!r} ({type(value).__name__}); a {kind.__qualname__} is needed")
    return value


def checked_needs(state: ModelState, card: ModelCard, settings: RunnerSettings) -> Needs:
    """What the state declares; refuses features that it cannot do and lengths that it cannot hold."""
    needs = declared(state, card, settings)
    if seated := [column.name for column in needs.columns if column.seats is not None]:
        raise ValueError(f"columns {seated} are seated; only sampler stages have seats to give, a model state declares plain columns")
    refused = {feature: answer.reason for feature in required_features(settings) if isinstance(answer := state.supports(feature), No)}
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


def pages_of(needs: Needs, settings: RunnerSettings, dtype: torch.dtype) -> tuple[int, list[GroupLayout]]:
    """Bytes of a page, and what it holds for each group. dtype: of activations."""
    groups, cache_dtype = needs.cache_groups, cache_type(settings, dtype)
    return page_layout(groups, settings.cache.page_size, {group.name: stored_type(group, cache_dtype, dtype).itemsize for group in groups})


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
    scheme_type = choose("linear_scheme", setting="linear.scheme", card=card, device=device, settings=settings)
    require_deterministic(settings, scheme_type, f"linear scheme {scheme_type.name}", "linear.scheme")
    linear = LinearFactory(scheme_type(ops, dtype, device.torch_device))
    context = BuildContext(settings=settings, card=card, ops=ops, linear=linear, dtype=dtype, device=device.torch_device)
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
