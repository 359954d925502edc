"""What a command line asks of a scenario: its name and how its requests sample. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelrunner.errors import RequestError

if TYPE_CHECKING:
    from modelrunner.plugins.bench.scenarios import Job
    from modelrunner.request import SamplingParams

Sampling = Mapping[str, Any]  # fields of SamplingParams, by name
GREEDY: Sampling = {"temperature": 0.0}
# A speed is of exactly so many tokens, told at the end: what is a benchmark's own to set, and what would end an output early.
OWN = ("max_tokens", "min_tokens", "ignore_eos", "detokenize", "output_kind", "n", "stop", "stop_token_ids", "structured_outputs")


FIELDS = re.compile(r",(?=[a-z_]+=)")  # a value may hold commas


@dataclass(frozen=True)
class Asked:
    """A scenario and how its requests sample; None: as the command line says for all."""

    name: str
    sampling: Sampling | None = None


def read_sampling(text: str) -> Sampling:
    """`0.6`, a temperature, or fields of SamplingParams: `temperature=0.8,top_p=0.95,top_k=50`; both: `0.8,top_p=0.95`.

    Values are JSON. A temperature that is not given is 0. Raises ValueError that says what is wrong.
    """
    from modelrunner.plugins.bench.scenarios import Job

    fields: dict[str, Any] = dict(GREEDY)
    for part in FIELDS.split(text):
        name, equals, value = part.partition("=")
        if not equals:
            name, value = "temperature", part
        if name in OWN:
            raise ValueError(f"{name} is the benchmark's own to set")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"{value!r} is no value of {name}; numbers and lists are written as in JSON") from None
    try:
        params_of(Job((), 1), fields)
    except RequestError as error:
        raise ValueError(str(error)) from None
    return fields


def as_record(sampling: Sampling) -> dict[str, Any]:
    """The entries of a record that say how requests sampled."""
    rest = {name: value for name, value in sampling.items() if name != "temperature"}
    return {"temperature": sampling["temperature"], **({"sampling": rest} if rest else {})}


def told(record: Mapping[str, Any]) -> str:
    """What `read_sampling` reads, from a record: empty for greedy."""
    temperature = record.get("temperature") or 0
    rest = [f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in record.get("sampling", {}).items()]
    return ",".join([f"{temperature:g}", *rest]) if temperature or rest else ""


def params_of(job: Job, sampling: Sampling) -> SamplingParams:
    """Exactly the job's tokens, as ids, told at the end. Raises RequestError for what SamplingParams does not take."""
    from modelrunner.request import OutputKind, SamplingParams

    own = {"max_tokens": job.output, "ignore_eos": True, "detokenize": False, "output_kind": OutputKind.FINAL_ONLY}
    return SamplingParams(**sampling, **own)
