"""Other ways to choose tokens, for `bench sampling`: plain torch with a sort, as it is usually written, and FlashInfer's sampler.

They get the same logits and the same wishes. FlashInfer takes float32 logits: the conversion is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelrunner.plugins.bench import sampling as own

if TYPE_CHECKING:
    import torch

    from modelrunner.plugins.bench.sampling import Call, Inputs


def torch_ways(given: Inputs) -> dict[str, Call]:
    """Operations of torch alone, eager ones, which here are captured like ours."""
    import torch

    n, vocab = given.rows.shape[0], given.counts.shape[1]
    k = torch.full((n, 1), own.TOP_K, device=given.rows.device)
    p = torch.full((n, 1), own.TOP_P, device=given.rows.device)
    repetition, presence, frequency = own.PENALTIES
    shifts = torch.arange(32, device=given.rows.device, dtype=torch.int32)
    prompt, output = given.token_ids[:, : own.PROMPT].long(), given.token_ids[:, own.PROMPT :].long()

    def draw(scores: torch.Tensor) -> torch.Tensor:
        """The race: probabilities over exponential numbers."""
        chance = scores.softmax(-1)
        return chance.div_(torch.empty_like(chance).exponential_()).argmax(-1)

    def filtered(logits: torch.Tensor) -> torch.Tensor:
        scores, place = (logits.float() / own.TEMPERATURE).sort(-1, descending=True)
        least = scores.gather(1, k - 1)
        scores.masked_fill_(scores < least, -torch.inf)
        before = scores.softmax(-1).cumsum(-1).roll(1, -1)
        before[:, 0] = 0
        scores.masked_fill_(before >= p, -torch.inf)
        return place.gather(1, draw(scores).unsqueeze(1))

    def penalties(logits: torch.Tensor) -> torch.Tensor:
        scores = logits.float()
        times = torch.zeros(n, vocab, device=logits.device).scatter_add_(1, output, torch.ones_like(output, dtype=torch.float32))
        seen = (times > 0).scatter_(1, prompt, True)
        scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
        scores -= frequency * times + presence * (times > 0)
        return draw(scores / own.TEMPERATURE)

    def logprobs(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = logits.argmax(-1, keepdim=True)
        found = logits.float().log_softmax(-1)
        top = found.topk(own.NUM_TOP, -1)
        mine = found.gather(1, chosen)
        return mine, top.values, top.indices, (found > mine).sum(-1)

    def mask(logits: torch.Tensor) -> torch.Tensor:
        bits = (given.masks[:n, :, None] >> shifts) & 1
        return logits.masked_fill(bits.flatten(1)[:, :vocab] == 0, -torch.inf).argmax(-1)

    return {
        "greedy": lambda logits: logits.argmax(-1),
        "temperature": lambda logits: draw(logits.float() / own.TEMPERATURE),
        "top-k and top-p": filtered,
        "all penalties": penalties,
        f"{own.NUM_TOP} log-probs": logprobs,
        "grammar mask": mask,
    }


def flashinfer_ways(given: Inputs) -> tuple[Mapping[str, Call], str]:
    """What FlashInfer can do of it; nothing, and why, where it is not installed or its kernels do not come about."""
    import torch

    device = given.rows.device
    if device.type != "cuda":
        return {}, "runs on NVIDIA GPUs"
    try:
        sampler: Any = __import__("flashinfer.sampling", fromlist=["sampling"])
    except Exception as error:
        return {}, f"cannot be imported: {type(error).__name__}: {error}"
    seed, offset = (torch.full((1,), value, dtype=torch.int64, device=device) for value in (7, 0))
    floats: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def scores(logits: torch.Tensor) -> torch.Tensor:
        """The logits in float32, made once; they are held, so that no others take their place."""
        if id(logits) not in floats:
            floats[id(logits)] = logits, logits.float()
        return floats[id(logits)][1]

    def filtered(logits: torch.Tensor) -> Any:
        return sampler.top_k_top_p_sampling_from_logits(scores(logits) / own.TEMPERATURE, own.TOP_K, own.TOP_P, seed=seed, offset=offset)

    def temperature(logits: torch.Tensor) -> Any:
        return sampler.sampling_from_logits(scores(logits) / own.TEMPERATURE, seed=seed, offset=offset)

    ways: dict[str, Call] = {"temperature": temperature, "top-k and top-p": filtered}
    try:
        for call in ways.values():
            call(torch.zeros(2, given.counts.shape[1], device=device))
        torch.cuda.synchronize()
    except Exception as error:
        return {}, f"does not run: {type(error).__name__}: {error}".splitlines()[0]
    finally:
        floats.clear()
    return ways, ""
