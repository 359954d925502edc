"""Rotary position embedding tables: default, linear, llama3, yarn and longrope frequencies."""

from __future__ import annotations

import math

import torch

from modelrunner.model_states.common.rope_spec import RopeSpec


def inverse_frequencies(spec: RopeSpec, length: int = 0) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of components, [rotary_dim / 2] float32, and the factor on cosine and sine.

    length: tokens of the longest request, on which `longrope` depends; 0 stands for all that the model holds.
    """
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return frequencies / spec.factor, 1.0
    if spec.kind == "llama3":
        return llama3_frequencies(frequencies, spec), 1.0
    if spec.kind == "yarn":
        return yarn_frequencies(frequencies, spec), yarn_attention_factor(spec)
    if spec.kind == "longrope":
        return frequencies / longrope_divisors(spec, length), longrope_attention_factor(spec)
    return frequencies, 1.0


def half_split(head_dim: int, rotary_dim: int | None = None) -> torch.Tensor:
    """The order of a head's rows that turns interleaved rotary positions (component 2i pairs with 2i + 1) into ours (i with
    i + rotary_dim / 2): `weight.unflatten(0, (-1, head_dim))[:, half_split(head_dim)].flatten(0, 1)`.

    rotary_dim: the components that rotate, the first ones; the others keep their places. None for all. Returns [head_dim] int64
    on the CPU. Raises ValueError for a rotary_dim that is odd or not within the head.
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    if rotary % 2 or not 0 <= rotary <= head_dim:
        raise ValueError(f"rotary_dim is {rotary} in a head of {head_dim}; an even number up to that is needed")
    return torch.cat((torch.arange(rotary).view(rotary // 2, 2).T.flatten(), torch.arange(rotary, head_dim)))


def llama3_frequencies(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1: wavelengths that fit `high_freq_factor` times into the original context stay, those that fit less than `low_freq_factor`
    times are stretched by `factor`, and the ones between go over linearly in that count."""
    low, high = float(spec.parameters["low_freq_factor"]), float(spec.parameters["high_freq_factor"])
    turns = spec.original_length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / spec.factor


def yarn_frequencies(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2, "NTK-by-parts"): the ramp runs over the index of the pair, between the indices
    that turn `beta_fast` and `beta_slow` times within the original context."""

    def pair_index(turns: float) -> float:
        return spec.rotary_dim * math.log(spec.original_length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first = pair_index(float(spec.parameters.get("beta_fast") or 32))
    last = pair_index(float(spec.parameters.get("beta_slow") or 1))
    if spec.parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rotary_dim - 1)
    width = last - first or 0.001  # a ramp of no width is a step
    stretched = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return frequencies / spec.factor * stretched + frequencies * (1.0 - stretched)


def yarn_attention_factor(spec: RopeSpec) -> float:
    """YaRN's temperature (equation 22) as a factor on cosine and sine; `mscale` and `mscale_all_dim` are DeepSeek's generalisation."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0

    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    over, under = spec.parameters.get("mscale"), spec.parameters.get("mscale_all_dim")
    return temperature(over) / temperature(under) if over and under else temperature(1.0)


def longrope_divisors(spec: RopeSpec, length: int) -> torch.Tensor:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): how much slower each pair turns, [rotary_dim / 2] float32.

    There is one set for contexts of the original length and one for longer ones. Cached keys cannot change sets when a request grows
    past that length, so the longest request that the engine admits decides for all: keep `max_model_len` at the original length to
    have the short set.
    """
    name = "long_factor" if (length or spec.max_position) > spec.original_length else "short_factor"
    return torch.tensor(spec.parameters[name], dtype=torch.float32)


def longrope_attention_factor(spec: RopeSpec) -> float:
    """The factor on cosine and sine that goes with LongRoPE in Phi-3: sqrt(1 + ln(extension) / ln(original length))."""
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_length)) if spec.factor > 1 else 1.0


def cos_sin_table(frequencies: torch.Tensor, scaling: float, length: int, device: torch.device | None = None) -> torch.Tensor:
    """[length, 2 * len(frequencies)] float32: cosines in the first half of each row, sines in the second."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies.float().cpu())
    return torch.cat((angles.cos(), angles.sin()), -1).mul_(scaling).to(device or frequencies.device)
