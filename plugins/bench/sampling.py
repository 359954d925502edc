"""`sampling`: what choosing tokens takes, by what requests ask for, beside one read of the logits and beside other implementations.

The operations are those that an engine on this device would run, as a step runs them. On a GPU each is captured several times over, with
two batches of logits in turn, so that a large batch comes from memory and not from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelrunner.plugins.bench import hardware

if TYPE_CHECKING:
    import torch

    from modelrunner.ops import Ops
    from modelrunner.plugin_manager import PluginManager

ROWS, VOCAB = 256, 151_936
PROMPT, OUTPUT = 128, 256  # tokens that penalties know of each row
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.95
PENALTIES = (1.1, 0.3, 0.2)  # repetition, presence, frequency
NUM_TOP = 5  # log-probs
# What the logits look like: spread of normal numbers, and how far ten tokens stand out.
SHAPES = {"flat": (0.6, 0.0), "peaked": (2.5, 12.0)}
COPIES = {"cuda": 10, "cpu": 1}  # of a call in one graph

Call = Callable[["torch.Tensor"], object]


@dataclass(frozen=True)
class Inputs:
    """Columns of a table of n rows, and what edits read: penalties' count words, masks of allowed ids."""

    rows: torch.Tensor
    samples: torch.Tensor
    computed: torch.Tensor
    query_len: torch.Tensor
    known: torch.Tensor
    prompt_len: torch.Tensor
    token_ids: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    counted: torch.Tensor
    counts: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def made(cls, n: int, vocab: int, device: torch.device) -> Inputs:
        import torch

        def full(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((n,), value, dtype=dtype, device=device)

        known = PROMPT + OUTPUT
        return cls(
            rows=torch.arange(n, dtype=torch.int32, device=device),
            samples=full(1, torch.bool),
            computed=full(known - 1),
            query_len=full(1),
            known=full(known),
            prompt_len=full(PROMPT),
            token_ids=torch.randint(0, vocab, (n, known), device=device).to(torch.int32),
            seed=torch.randint(-(2**62), 2**62, (n,), device=device),
            choice=full(0),
            counted=full(0),
            counts=torch.zeros(n + 1, vocab, dtype=torch.int32, device=device),
            masks=torch.randint(-(2**31), 2**31, (n + 1, -(-vocab // 32)), device=device).to(torch.int32),
        )

    def column(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.full_like(self.rows, value, dtype=dtype)


def cases(ops: Ops, given: Inputs) -> dict[str, Call]:
    """What a step's tail runs on logits [n, V], by what all of its rows ask for."""
    import torch

    drawing = (given.rows, given.samples, given.computed, given.query_len)
    plain: dict[str, Any] = {"temperature": given.column(TEMPERATURE, torch.float32), "seed": given.seed, "choice": given.choice}
    plain |= dict.fromkeys(("top_k", "top_p", "min_p"))
    filters = {
        "top_k": given.column(TOP_K, torch.int32),
        "top_p": given.column(TOP_P, torch.float32),
        "min_p": given.column(0.0, torch.float32),  # the stages of filters act together
    }
    known = (given.rows, given.known, given.prompt_len, given.token_ids)
    factors = [given.column(value, torch.float32) for value in PENALTIES]
    wanted = given.column(NUM_TOP, torch.int32)

    def greedy(logits: torch.Tensor) -> Any:
        return ops.greedy_rows(logits, given.samples)

    def temperature(logits: torch.Tensor) -> Any:
        return ops.sample_rows(logits, *drawing, **plain)

    def filtered(logits: torch.Tensor) -> Any:
        return ops.sample_rows(logits, *drawing, **(plain | filters))

    def penalties(logits: torch.Tensor) -> Any:
        ops.count_tokens(given.rows, given.samples, given.rows, given.counted, given.prompt_len, given.known, given.token_ids, given.counts)
        return temperature(ops.edit_logits(logits, *known, None, None, None, None, (given.rows, given.counts, *factors)))

    def logprobs(logits: torch.Tensor) -> Any:
        return ops.token_logprobs(logits, greedy(logits)[0], given.rows, wanted, NUM_TOP)

    def processed(logits: torch.Tensor) -> Any:
        """With `sampler.logprobs_mode=processed`, the tokens drawn with filters."""
        given_to = ops.processed_logits(logits, plain["temperature"], *filters.values())
        return ops.token_logprobs(given_to, filtered(logits)[0], given.rows, wanted, NUM_TOP)

    def mask(logits: torch.Tensor) -> Any:
        """In place, as in a step without log-probs of the raw logits."""
        ops.mask_logits(logits, given.rows, (given.rows, given.masks), None)
        return greedy(logits)

    return {
        "greedy": greedy,
        "temperature": temperature,
        "top-k and top-p": filtered,
        "all penalties": penalties,
        f"{NUM_TOP} log-probs": logprobs,
        "the same, processed": processed,
        "grammar mask": mask,
    }


def logits_of(n: int, vocab: int, shape: str, device: torch.device) -> torch.Tensor:
    """[n, vocab], bfloat16 on a GPU."""
    import torch

    spread, ahead = SHAPES[shape]
    made = torch.randn(n, vocab, device=device) * spread
    chosen = torch.randint(0, vocab, (n, 10), device=device)
    made.scatter_add_(1, chosen, ahead + torch.randn(n, 10, device=device) * 2 * (ahead > 0))
    return made.to(torch.bfloat16 if device.type == "cuda" else torch.float32)


def microseconds(call: Call, pair: list[torch.Tensor]) -> float:
    """Of one call, over the logits in turn."""
    device = pair[0].device
    copies = COPIES[device.type]

    def work() -> None:
        for place in range(copies):
            call(pair[place % len(pair)])

    seconds = hardware.captured_seconds(work, device) if device.type == "cuda" else hardware.seconds_of(work, device, repeats=3)
    return seconds / copies * 1e6


def reads() -> dict[str, Call]:
    """Ways to read the logits once and do little else with them; the fastest of them, or greedy choice, is what all are measured in."""
    import torch

    return {
        "largest of each row": lambda logits: logits.amax(1),
        "sum of all": lambda logits: logits.view(torch.float32).sum() if logits.element_size() == 2 else logits.sum(),
        "largest of all": lambda logits: logits.view(torch.int32).amax(),
    }


def measure_sampling(manager: PluginManager, settings: Mapping[str, Any], scale: float = 1.0) -> Iterator[dict[str, Any]]:
    """One record for each shape of the logits. scale: of rows and vocabulary."""
    import torch

    from modelrunner.assemble import resolve_ops, settle
    from modelrunner.choosing import Chooser
    from modelrunner.plugins.bench.engines import versions
    from modelrunner.plugins.bench.sampling_rivals import flashinfer_ways, torch_ways

    own = settle(settings, manager)
    device = Chooser(manager, own)("device", setting="device.name", settings=own)(own)
    where = device.torch_device
    n, vocab = max(1, round(ROWS * scale)), max(128, round(VOCAB * scale) // 16 * 16)
    torch.manual_seed(0)
    bandwidth = hardware.copy_bandwidth(where)
    given = Inputs.made(n, vocab, where)
    with torch.inference_mode():
        ways: dict[str, Mapping[str, Call]] = {"modelrunner": cases(resolve_ops(manager, device), given), "torch": torch_ways(given)}
        found, problem = flashinfer_ways(given)
        ways |= {"flashinfer": found} if found else {}
        for shape in SHAPES:
            pair = [logits_of(n, vocab, shape, where) for _ in range(2)]
            taken = {
                way: {name: microseconds(call, [each.clone() for each in pair]) for name, call in calls.items()}
                for way, calls in ways.items()
            }
            read = {name: microseconds(call, pair) for name, call in reads().items()} | {"greedy": taken["modelrunner"]["greedy"]}
            yield {
                "scenario": "sampling",
                "engine": "modelrunner",
                "rows": n,
                "vocab_size": vocab,
                "logits": shape,
                "dtype": str(pair[0].dtype).removeprefix("torch."),
                "read_us": min(read.values()),
                "reads_us": read,
                "us": taken,
                "no_flashinfer": problem,
                "copy_bandwidth": bandwidth,
                "device_name": hardware.device_name(where),
                "versions": versions(),
            }


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """A record for people: microseconds, and in brackets reads of the logits."""
    read = record["read_us"]
    size = record["rows"] * record["vocab_size"] * (2 if record["dtype"] == "bfloat16" else 4)
    yield (
        f"sampling, {record['rows']} rows of {record['vocab_size']:,} {record['dtype']} logits, {record['logits']}: one read {read:.1f} us "
        f"({size / read / 1e3:,.0f} GB/s; a copy reaches {record['copy_bandwidth'] / 1e9:,.0f})"
    )
    ways = record["us"]
    yield f"  {'microseconds (reads)':<22}" + "".join(f"{way:>20}" for way in ways)
    for name in ways["modelrunner"]:
        cells = [f"{ways[way][name]:.1f} ({ways[way][name] / read:.2f})" if name in ways[way] else "" for way in ways]
        yield f"  {name:<22}" + "".join(f"{cell:>20}" for cell in cells).rstrip()
    if record["no_flashinfer"]:
        yield f"  FlashInfer: {record['no_flashinfer']}"
