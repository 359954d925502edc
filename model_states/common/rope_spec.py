"""Rotary position embedding: what a configuration says of it, in either spelling, without torch.

transformers 5 writes `rope_parameters` (`rope_theta` inside); older files have `rope_theta` and `rope_scaling` (`type` for `rope_type`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KNOWN = ("default", "linear", "llama3", "yarn", "longrope")
OLDER_NAMES = {"su": "longrope"}
REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class RopeSpec:
    """Everything that the table depends on.

    kind: one of KNOWN. theta: base of the frequencies. rotary_dim: components of a head that rotate. max_position: positions that the
    model was made for. parameters: the scaling's own numbers, under their Hugging Face names.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position: int
    parameters: Mapping[str, Any]

    @property
    def original_length(self) -> int:
        """Positions of the training before the context was extended."""
        return int(self.parameters.get("original_max_position_embeddings") or self.max_position)

    @property
    def factor(self) -> float:
        """How many times the context was extended."""
        return float(self.parameters.get("factor") or self.max_position / self.original_length)

    @property
    def max_length(self) -> int:
        """Positions that the scaled table is good for: `linear` and `yarn` may stretch `max_position_embeddings`."""
        if self.kind == "linear" and "original_max_position_embeddings" not in self.parameters:
            return int(self.max_position * self.factor)
        return max(self.max_position, int(self.original_length * self.factor)) if self.kind in ("linear", "yarn") else self.max_position


def theta_of(value: Any) -> float:
    """The base of the frequencies; 10000 where none is given. Raises ValueError for what is no number."""
    try:
        return float(value or 10000.0)
    except (TypeError, ValueError):
        raise ValueError(f"rope_theta is {value!r}; a number is needed") from None


def rope_spec(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """Read the rope fields of `config`. Raises ValueError that names the field for a kind or a layout that is not supported."""
    given = {name: config.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    if odd := [f"{name} is {value!r}" for name, value in given.items() if not isinstance(value, Mapping)]:
        raise ValueError(f"{' and '.join(odd)}; an object is needed, or null")
    parameters: dict[str, Any] = {"rope_theta": config.get("rope_theta"), **given["rope_scaling"], **given["rope_parameters"]}
    per_layer = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if per_layer:
        raise ValueError(f"rope_parameters differ by layer type ({', '.join(per_layer)}); one set for all layers is supported")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = OLDER_NAMES.get(kind, kind)
    if kind not in KNOWN:
        raise ValueError(f"rope_type is {kind!r}; supported are {', '.join(KNOWN)}")
    absent = [name for name in REQUIRED.get(kind, ()) if parameters.get(name) is None]
    if absent:
        raise ValueError(f"rope_type is {kind!r}, which needs {', '.join(absent)} in rope_parameters; found {sorted(parameters)}")
    rotary_dim = int(head_dim * float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0))
    if kind == "longrope":
        parameters["original_max_position_embeddings"] = original_length(config, parameters)
        wrong = {name: len(parameters[name]) for name in REQUIRED[kind] if len(parameters[name]) != rotary_dim // 2}
        if wrong:
            raise ValueError(f"rope_parameters have {wrong} entries; {rotary_dim // 2} are needed, one for each pair of components")
    return RopeSpec(
        kind=kind,
        theta=theta_of(parameters.get("rope_theta")),
        rotary_dim=rotary_dim,
        max_position=int(config["max_position_embeddings"]),
        parameters=parameters,
    )


def original_length(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int | None:
    """Tokens of the original context; Phi-3 says it outside the rope's own fields."""
    return config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
