"""What a start says of calls that could not work: of attention, of taps, and of a drafter's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from modelrunner import ModelInfo, Offer, Result, SamplingParams, Tap, hookimpl
from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.cache_groups import FullAttention, RecurrentState
from modelrunner.checkpoint import ModelCard
from modelrunner.engine import Engine
from modelrunner.errors import CapacityError, ModelRunnerError, PluginError
from modelrunner.model_state import Needs, No, Yes
from modelrunner.request_table import Column
from modelrunner.settings import RunnerSettings
from modelrunner.speculation import Drafter, DrafterNeeds, DraftStep
from modelrunner.start_checks import CheckedAttention
from modelrunner.testing import Driver, P, ScriptedPlugin, dense, mixed, options
from modelrunner.testing.scripted import MODEL_NAME, ScriptedState

HEADS, KV_HEADS, DIM = 4, 2, 8
GROUPS = (FullAttention("full", (0, 2), HEADS, KV_HEADS, DIM, scale=1.0), RecurrentState("state", (1,), (4,), interval=16))
SINKING = FullAttention("sinking", (3,), HEADS, KV_HEADS, DIM, scale=1.0, sinks=True)


class Attends(ScriptedState):
    """A state whose `forward` calls attention, and its taps, in the way that a test says."""

    points: Sequence[str] = ()
    groups: Sequence[Any] = GROUPS
    answer: Yes | No = Yes()

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        return replace(super().declare(card, settings), cache_groups=tuple(self.groups), tap_points=tuple(self.points))

    def supports(self, feature: str) -> Yes | No:
        return self.answer if feature == "taps" else Yes()

    def call(self, attention: Mapping[str, BoundAttention], tokens: int) -> object:
        return None

    def tapped(self, hidden: torch.Tensor, tap: Callable[[str, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return hidden

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Any, caches: Any, tap: Any) -> torch.Tensor:
        self.call(attention, hidden.shape[0])
        return self.tapped(hidden, tap)


def start(device: str = "cpu", plugins: Sequence[object] = (), **members: Any) -> Engine:
    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Slipped", (Attends, plugin.state), members)
    return Engine({"model": {"name": MODEL_NAME}} | options(device=device, prefix=False), plugins=[plugin, *plugins])


def heads(tokens: int, num_heads: int, dim: int = DIM, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(tokens, num_heads, dim, dtype=dtype)


def calling(group: str, layer: int, make: Callable[[int], Sequence[Any]]) -> Callable[..., Any]:
    return lambda state, attention, tokens: attention[group](*make(tokens), layer)


def right(tokens: int) -> tuple[torch.Tensor, ...]:
    return heads(tokens, HEADS), heads(tokens, KV_HEADS), heads(tokens, KV_HEADS)


def flat(width: int, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    return lambda state, attention, tokens: attention["full"].from_qkv(torch.zeros(tokens, width, dtype=dtype), None, 2)


ACCEPTED = r"; accepted: q \[T, H, D\] = \[1, 4, 8\], k and v \[T, HK, D\] = \[1, 2, 8\], of torch.float32"
MISTAKES: list[tuple[Any, str]] = [
    (calling("full", 2, lambda t: (torch.zeros(t, HEADS * DIM), *right(t)[1:])), rf"layer 2 with q \[1, 32\] torch.float32{ACCEPTED}"),
    (calling("full", 0, lambda t: (right(t)[0].transpose(0, 1), *right(t)[1:])), rf"layer 0 with q \[4, 1, 8\] torch.float32{ACCEPTED}"),
    (calling("full", 0, lambda t: (right(t)[0].half(), *right(t)[1:])), rf"layer 0 with q \[1, 4, 8\] torch.float16{ACCEPTED}"),
    (calling("full", 0, lambda t: (right(t)[0],) * 3), r"layer 0 with k \[1, 4, 8\] torch.float32 and v \[1, 4, 8\] torch.float32; acc"),
    (calling("full", 0, lambda t: (*right(t)[:2], None)), rf"layer 0 with v None \(NoneType\){ACCEPTED}"),
    (calling("full", 1, right), r"layer 1, but layer 1 is not in cache group 'full', which has the layers \[0, 2\]"),
    (
        flat(HEADS * DIM),
        r"layer 2 with qkv \[1, 32\] torch.float32; accepted: qkv \[T, \(H \+ 2 \* HK\) \* D\] = \[1, 64\], of ",
    ),
    (flat(64, torch.float64), r"layer 2 with qkv \[1, 64\] torch.float64; accepted"),
]


@pytest.mark.parametrize("device", ["cpu", "deferred_cpu"])
@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_wrong_call_of_attention_is_told_at_the_start(call: Any, message: str, device: str) -> None:
    told = rf"model_state scripted .*ScriptedPlugin.*Slipped\.forward called `attention\['full'\]` for {message}"
    with pytest.raises(PluginError, match=told):
        start(device, call=call)


def test_what_fails_with_more_than_one_token_is_told_at_the_start() -> None:
    """Of one token the transposed tensor has the right shape."""
    single = FullAttention("full", (0,), 1, 1, DIM, scale=1.0)
    swapped = calling("full", 0, lambda t: (heads(1, t),) + (heads(t, 1),) * 2)
    with pytest.raises(PluginError, match=r"with q \[1, (\d\d), 8\] torch.float32; accepted: q \[T, H, D\] = \[\1, 1, 8\]"):
        start(groups=(single,), call=swapped)


def test_a_group_that_does_not_attend_is_told_with_who_called() -> None:
    with pytest.raises(PluginError, match=r"Slipped\.forward called `attention\['state'\]` for layer 1, but .*does not attend"):
        start(call=lambda state, attention, tokens: attention["state"].from_qkv(torch.zeros(tokens, 64), None, 1))


def test_sinks_are_one_for_each_head() -> None:
    def call(state: Any, attention: Any, tokens: int) -> None:
        attention["sinking"](*right(tokens), 3, torch.zeros(HEADS + 1))

    with pytest.raises(PluginError, match=r"'sinking'\]` for layer 3 with sinks \[5\] torch.float32; accepted: \[4\], one for each"):
        start(groups=(SINKING,), call=call)


def test_steps_of_requests_have_plain_attention() -> None:
    kinds: list[type] = []
    engine = start(call=lambda state, attention, tokens: (kinds.append(type(attention["full"])), attention["full"](*right(tokens), 0)))
    assert set(kinds) == {CheckedAttention}
    kinds.clear()
    driver = Driver(engine)
    driver.add("a", P(5, 3), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    driver.finish()
    assert set(kinds) == {BoundAttention}


# ---- tap points ------------------------------------------------------------------------------------------------------


def at(*points: str) -> Callable[..., torch.Tensor]:
    def tapped(state: Any, hidden: torch.Tensor, tap: Any) -> torch.Tensor:
        for point in points:
            hidden = tap(point, hidden)
        return hidden

    return tapped


@pytest.mark.parametrize("device", ["cpu", "deferred_cpu"])
@pytest.mark.parametrize(
    ("declared", "called", "message"),
    [
        (
            ("layer.0", "layer.1"),
            ("layer.0", "layr.1"),
            r"called its tap at 'layr\.1', which .*; did you mean 'layer\.1'\?; declared \(Needs\.tap_points\): 'layer\.0', 'layer\.1'",
        ),
        ((), ("layer.0",), r"called its tap at 'layer\.0', which is not among .*; declared \(Needs\.tap_points\): none"),
        (("layer.0", "layer.1"), ("layer.0",), r"never called its tap at 'layer\.1': .* it called 'layer\.0'; call"),
        (("layer.0", "layer.1"), (), r"never called its tap at 'layer\.0', 'layer\.1': .* it called none; call"),
    ],
)
def test_tap_points_that_are_not_as_declared(declared: Sequence[str], called: Sequence[str], message: str, device: str) -> None:
    with pytest.raises(PluginError, match=rf"model_state scripted .*ScriptedPlugin.*Slipped\.forward {message}"):
        start(device, points=declared, tapped=at(*called))


def test_tap_points_that_are_as_declared() -> None:
    start(points=("layer.0", "layer.1"), tapped=at("layer.1", "layer.0"))


def test_a_state_that_cannot_be_tapped_need_not_call() -> None:
    start(points=("layer.0",), answer=No("its layers are one kernel"))


def test_a_point_may_be_called_in_some_steps_alone() -> None:
    """Here in those of a prompt."""
    start(points=("long",), tapped=lambda state, hidden, tap: tap("long", hidden) if hidden.shape[0] > 1 else hidden)


# ---- taps ------------------------------------------------------------------------------------------------------------


class Odd(Tap):
    name = "odd"
    results = (Result("one"),)

    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"one": torch.zeros(batch.num_rows)}


class OddPlugin:
    MODELRUNNER_API = ">=1,<2"

    def __init__(self, **members: Any) -> None:
        self.tap = type("Odd", (Odd,), members)()

    @hookimpl
    def taps(self, model_info: ModelInfo) -> Tap:
        return self.tap


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"outputs": lambda tap, batch: {}["x"]}, "tap 'odd' failed to give its outputs: KeyError: 'x'"),
        ({"outputs": lambda tap, batch: None}, r"tap 'odd' gave None for its outputs; a mapping of \['one'\] to tensors is needed"),
        ({"outputs": lambda tap, batch: {"one": 3}}, r"tap 'odd' gave output 'one' as 3 \(int\); it declares \[1\] torch.float32"),
        ({"points": "layer.0"}, r"tap 'odd' of plugin '.*OddPlugin.*' has points = 'layer\.0'; a tuple of str is needed"),
        ({"results": Result("one")}, r"tap 'odd' of plugin '.*OddPlugin.*' has results = Result\(.*; a tuple of Result is needed"),
        ({"buffers": ("x",)}, r"tap 'odd' of plugin '.*OddPlugin.*' has buffers = \('x',\); a tuple of StaticBuffer is needed"),
        ({"columns": lambda tap, settings: {}["x"]}, r"tap 'odd' of plugin '.*OddPlugin.*' failed to give its columns: KeyError: 'x'"),
        ({"columns": lambda tap, settings: Column("x", torch.int32)}, r"tap 'odd' of plugin '.*OddPlugin.*' gave the columns Column\("),
    ],
)
def test_a_taps_mistakes_name_it(members: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=rf"^{message}"):
        start(plugins=[OddPlugin(**members)])


def test_outputs_of_a_model_state_name_it() -> None:
    def declare(state: Any, card: ModelCard, settings: RunnerSettings) -> Needs:
        return replace(ScriptedState.declare(state, card, settings), results=(Result("one"),))

    with pytest.raises(PluginError, match=r"^Slipped\.outputs gave the outputs \['two'\]; it declares \['one'\]"):
        start(declare=declare, outputs=lambda state, batch: {"two": torch.zeros(1)})


# ---- drafters --------------------------------------------------------------------------------------------------------

GROUP = FullAttention("draft", (0,), HEADS, KV_HEADS, DIM, scale=1.0)


class FailingPlugin:
    """Offers the drafter `failing`, which does what a test says."""

    MODELRUNNER_API = ">=1.6,<2"

    def __init__(self, propose: Callable[[DraftStep], object]) -> None:
        self.do = propose

    @hookimpl
    def drafter(self) -> Offer[type[Drafter]]:
        do = self.do

        class Failing(Drafter):
            def declare(self) -> DrafterNeeds:
                return DrafterNeeds(cache_groups=(GROUP,))

            def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
                do(step)

        return Offer("failing", lambda: Failing)


def short_keys(step: DraftStep) -> None:
    tokens = step.batch.num_tokens
    step.attention["draft"](heads(tokens, HEADS), heads(tokens, 1), heads(tokens, KV_HEADS), 0)


def short_pass(step: DraftStep) -> None:
    if step.num_draft:
        single = step.next_pass(0)
        single.attention["draft"](*right(single.batch.num_tokens + 1), 0)


def out_of_memory(step: DraftStep) -> None:
    raise torch.OutOfMemoryError("none left")


@pytest.mark.parametrize("device", [{}, {"device": "deferred_cpu"}, {"device": "deferred_cpu", "captures": True}], ids=str)
@pytest.mark.parametrize(
    ("propose", "kind", "message"),
    [
        (lambda step: {}["x"], PluginError, r"^drafter failing \(.*FailingPlugin.*\) failed in `propose`: KeyError: 'x'"),
        (
            short_keys,
            PluginError,
            r"^drafter failing .*drafter failing .* called `attention\['draft'\]` for layer 0 with k \[1, 1, 8\] torch.float32; acc",
        ),
        (short_pass, PluginError, r"^drafter failing .*with q \[2, 4, 8\] torch.float32 and k .*; accepted: q \[T, H, D\] = \[1, 4, 8\]"),
        (out_of_memory, CapacityError, "does not fit into the device's memory"),
    ],
)
def test_what_a_drafter_raises_at_the_start_names_it(
    propose: Callable[[DraftStep], object], kind: type[ModelRunnerError], message: str, device: dict[str, Any]
) -> None:
    subject = replace(dense(), plugins=(*dense().plugins, FailingPlugin(propose)))
    with pytest.raises(kind, match=message):
        subject.engine(drafter="failing", **device)
