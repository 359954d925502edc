"""What a runner is made of, and the route of steps that repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from modelrunner.attention import AttentionBackend
from modelrunner.batch import Plan
from modelrunner.device import Device
from modelrunner.draft_policy import DraftPolicy
from modelrunner.errors import CheckpointError
from modelrunner.model_state import ModelState, Needs
from modelrunner.ops import Ops
from modelrunner.page_pool import GroupLayout
from modelrunner.request_table import RequestTable
from modelrunner.sampler import Sampler
from modelrunner.speculation import Drafter, DrafterNeeds
from modelrunner.step_buffers import Shape
from modelrunner.tap_set import TapSet
from modelrunner.weights import Target, WeightMap, store


@dataclass(frozen=True)
class Drafting:
    """The drafter of an engine. policy: how many drafts steps have. capture_problem: why `propose` is not captured with the step; empty if
    it is. shared_map: where its tensors go, if they come with the target's. name: of its offer and plugin, for messages."""

    drafter: Drafter
    needs: DrafterNeeds
    policy: DraftPolicy
    capture_problem: str = ""
    shared_map: WeightMap | None = None
    name: str = ""

    @property
    def label(self) -> str:
        """The drafter, for messages."""
        return f"drafter {self.name or type(self.drafter).__name__}"

    @property
    def most(self) -> int:
        """K, the largest number of drafts of a row in a step."""
        return self.policy.most

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of its cache groups."""
        return tuple(group.name for group in self.needs.cache_groups)

    def passing(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """`tensors` of a new version of the target's weights; those that are the drafter's are stored in it on the way.

        Raises CheckpointError for one that does not fit.
        """
        names: Mapping[str, Sequence[Target]] = {} if self.shared_map is None else self.shared_map.names
        for name, tensor in tensors:
            for target in names.get(name, ()):
                assert self.drafter.module is not None, "it has weights"
                try:
                    store(self.drafter.module, target, tensor)
                except (ValueError, RuntimeError, AttributeError) as error:
                    raise CheckpointError(f"{name} does not fit the drafter ({target.path}): {error}") from error
            yield name, tensor


@dataclass(frozen=True)
class Parts:
    """What a runner is put together from, each chosen or built at start-up. media_arena: see `Encoder`; None where there are no media."""

    device: Device
    ops: Ops
    state: ModelState
    needs: Needs
    dtype: torch.dtype
    sampler: Sampler
    table: RequestTable
    layouts: Sequence[GroupLayout]
    caches: Mapping[str, torch.Tensor]
    backends: Mapping[str, AttentionBackend]
    taps: TapSet
    media_arena: torch.Tensor | None = None
    drafting: Drafting | None = None

    @property
    def drafter(self) -> Drafter | None:
        return None if self.drafting is None else self.drafting.drafter


@dataclass(frozen=True)
class Route:
    """How steps run that have the rows of `plan`: padded to `shape`, as the graphs of `replay`, or eagerly if that is None.

    The last launched step's rows are still on the device, so a step of the same route sends its patch only.
    """

    plan: Plan
    shape: Shape
    replay: Callable[[], None] | None

    def serves(self, plan: Plan) -> bool:
        """Whether `plan` has the very arrays of this route; they are not written any more (see `steady`)."""
        own = self.plan
        return (
            plan.rows is own.rows
            and plan.generations is own.generations
            and plan.num_query is own.num_query
            and plan.features is own.features
        )
