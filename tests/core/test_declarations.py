"""What a plugin declares wrongly: an engine start names the plugin's part, what is wrong with it, and what is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from modelrunner import Tap, hookimpl
from modelrunner.checkpoint import ModelCard
from modelrunner.engine import Engine
from modelrunner.errors import PluginError
from modelrunner.model_state import BuildContext, CacheGroup, FullAttention, Needs, RecurrentState, SlidingWindow, StaticBuffer
from modelrunner.request_table import Column
from modelrunner.settings import RunnerSettings
from modelrunner.speculation import DrafterNeeds
from modelrunner.taps import ModelInfo
from modelrunner.testing import ScriptedPlugin, mixed, options
from modelrunner.testing.scripted import MODEL_NAME, ScriptedState
from modelrunner.weights import Target, WeightMap

BLAMED = "model_state scripted (argument:ScriptedPlugin)"
SIZES: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "scale": 1.0}


def start(*more: object, **methods: Any) -> Engine:
    """An engine of the scripted model with other methods. more: further plugins."""
    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Wrong", (plugin.state,), methods)
    return Engine({"model": {"name": MODEL_NAME}} | options(), plugins=[plugin, *more])


def declaring(change: Callable[[Needs], Needs]) -> Callable[[ScriptedState, ModelCard, RunnerSettings], Needs]:
    def declare(self: ScriptedState, card: ModelCard, settings: RunnerSettings) -> Needs:
        return change(ScriptedState.declare(self, card, settings))

    return declare


def full(**sizes: Any) -> CacheGroup:
    return FullAttention("more", (0,), **SIZES | sizes)


def buffer(shape: Any, dtype: Any = torch.int32) -> dict[str, Any]:
    return {"buffers": (StaticBuffer("b", shape, dtype),)}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (lambda: {"cache_groups": (full(head_dim=0),)}, "cache group 'more': head_dim is 0; a whole number above 0 is needed"),
        (lambda: {"cache_groups": (full(num_kv_heads=0.5),)}, "cache group 'more': num_kv_heads is 0.5; a whole number"),
        (
            lambda: {"cache_groups": (SlidingWindow("near", (0,), **SIZES | {"num_heads": -1}, window_size=4),)},
            "cache group 'near': num_heads is -1; a whole number above 0 is needed",
        ),
        (lambda: {"cache_groups": (replace(full(), layers=()),)}, "cache group 'more': layers is (); the index of at least one layer"),
        (
            lambda: {"cache_groups": (RecurrentState("kept", (0,), state_shape=(0, 3), interval=8),)},
            "cache group 'kept': what a layer keeps in a page of 8 tokens has the shape (0, 3); whole numbers above 0 are needed",
        ),
        (
            lambda: {"cache_groups": (RecurrentState("kept", (0,), (2,), 8, dtype="float32"),)},  # type: ignore[arg-type]
            "cache group 'kept': its type is 'float32'; a torch.dtype is needed",
        ),
        (lambda: {"cache_groups": ("full",)}, "Needs: cache_groups has 'full'; every entry must be a CacheGroup"),
        (lambda: {"cache_groups": (full(), full())}, "cache groups [('more', (0,)), ('more', (0,))]: each name"),
        (lambda: buffer(("tokenz", 4)), "buffer 'b': 'tokenz' in its shape; accepted are 'tokens', 'rows' and whole numbers from 0 on"),
        (lambda: buffer(("rows", -1)), "buffer 'b': -1 in its shape; accepted are"),
        (lambda: buffer("tokens"), "buffer 'b': shape is 'tokens'; a tuple is needed, also of one, e.g. ('tokens',)"),
        (lambda: buffer(("tokens",), "int32"), "buffer 'b': dtype is 'int32'; a torch.dtype is needed"),
        (lambda: {"buffers": ("b",)}, "Needs: buffers has 'b'; every entry must be a StaticBuffer"),
        (lambda: {"columns": ("mark",)}, "Needs: columns has 'mark'; every entry must be a Column"),
        (lambda: {"columns": (Column("", torch.int32),)}, "column '': a text that is not empty is needed as its name"),
        (lambda: {"columns": (Column("mark", torch.int32, width="3"),)}, "column 'mark': width '3' must be a whole number"),  # type: ignore[arg-type]
        (lambda: {"columns": (Column("mark", torch.int32),) * 2}, "columns has several of the names ['mark']; each may stand there once"),
    ],
)
def test_what_a_model_state_declares_wrongly(fields: Callable[[], dict[str, Any]], told: str) -> None:
    with pytest.raises(PluginError) as caught:
        start(declare=declaring(lambda needs: replace(needs, **fields())))
    assert str(caught.value).startswith(f"{BLAMED} failed at start-up: ")
    assert told in str(caught.value)


def test_a_drafter_is_held_to_the_same() -> None:
    with pytest.raises(TypeError, match="DrafterNeeds: buffers has 'b'; every entry must be a StaticBuffer"):
        DrafterNeeds(buffers=("b",))  # type: ignore[arg-type]


class Odd(CacheGroup):
    """Keeps something by the token, as long as it is one."""

    def token_shape(self) -> tuple[int, ...]:
        return (4,)

    def page_elements(self, tokens: int) -> int:
        raise RuntimeError(f"no page of {tokens} tokens")


def test_a_group_that_cannot_lay_out_its_pages() -> None:
    with pytest.raises(PluginError) as caught:
        start(declare=declaring(lambda needs: replace(needs, cache_groups=(Odd("odd", (0,)),))))
    assert str(caught.value).startswith(f"sharing pages between the cache groups of {BLAMED} failed at start-up: RuntimeError: no page of ")


@pytest.mark.parametrize(
    ("name", "owner"), [("known", "the engine"), ("pages.full", "the engine"), ("temperature", "the sampler"), ("tap.held", BLAMED)]
)
def test_a_column_whose_name_is_taken(name: str, owner: str) -> None:
    other = "the taps 'held'" if owner == BLAMED else BLAMED
    with pytest.raises(PluginError) as caught:
        start(Held(()), declare=declaring(lambda needs: replace(needs, columns=(Column(name, torch.int32),))))
    assert str(caught.value) == f"{owner} and {other} both bring the column {name!r}; rename one, or disable one plugin"


class Holding(Tap):
    name = "held"

    def __init__(self, columns: object) -> None:
        self.given = columns

    def columns(self, settings: RunnerSettings) -> Any:
        return self.given


class Held:
    """A plugin with a tap. columns: what that gives."""

    def __init__(self, columns: object) -> None:
        self.tap = Holding(columns)

    @hookimpl
    def taps(self, model_info: ModelInfo) -> Tap:
        return self.tap


def test_a_tap_whose_columns_are_none_or_taken() -> None:
    with pytest.raises(PluginError, match=r"tap 'held' of .*argument:Held"):
        start(Held(("mark",)))
    with pytest.raises(PluginError, match=r"^the engine and the taps 'held' both bring the column 'known'"):
        start(Held((Column("known", torch.int32),)))


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda batch: batch.per_row("mrk"), r"no column of the request table is called 'mrk'; there are 'token_ids', .*'mark'"),
        (lambda batch: batch.columns["mrk"], r"no column of the request table is called 'mrk'; there are 'token_ids', .*'mark'"),
        (lambda batch: batch.buffers["nothing"], r"no static buffer is called 'nothing'; declared are 'mine'"),
    ],
)
def test_a_name_that_was_not_declared(read: Callable[[Any], object], told: str) -> None:
    def before_forward(self: ScriptedState, batch: Any) -> None:
        read(batch)

    mine = {"columns": (Column("mark", torch.int32),), "buffers": (StaticBuffer("mine", ("rows",), torch.int32),)}
    with pytest.raises(PluginError, match=rf"{re.escape(BLAMED)} failed at start-up: .*{told}"):
        start(declare=declaring(lambda needs: replace(needs, **mine)), before_forward=before_forward)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (("qkv", 3), "the target qkv names part 3 of a Linear of 3 parts; accepted: 0, 1, 2, or None for all of them"),
        (("qkv", 0, "wieght"), "the target qkv is of kind 'wieght'; accepted: 'weight', 'bias', 'parameter'"),
    ],
)
def test_a_target_that_is_nowhere(target: tuple[Any, ...], told: str) -> None:
    def build(self: ScriptedState, ctx: BuildContext) -> torch.nn.Module:
        module = torch.nn.Module()
        module.qkv = ctx.linear(4, (4, 2, 2))
        return module

    def weight_map(self: ScriptedState, card: ModelCard) -> WeightMap:
        return WeightMap({"layers.0.v_proj.weight": (Target(*target),)})

    with pytest.raises(PluginError) as caught:
        start(build=build, weight_map=weight_map)
    assert str(caught.value) == f"{BLAMED} failed at start-up: ValueError: weight map, 'layers.0.v_proj.weight': {told}"
