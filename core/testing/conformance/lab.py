"""What the tests of one conformance class share: checkpoints, the reference, engines, plain results. Made once per class."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modelrunner.choosing import Chooser, open_checkpoint
from modelrunner.hookspecs import hookimpl
from modelrunner.model_state import ModelState, No, Yes
from modelrunner.offers import Offer
from modelrunner.request import SamplingParams
from modelrunner.testing.conformance.trace import StepTrace
from modelrunner.testing.drive import Driver
from modelrunner.testing.probe import EngineProbe
from modelrunner.testing.subjects import options

if TYPE_CHECKING:
    from modelrunner.engine import Engine
    from modelrunner.testing.conformance.case import StateCase

Reference = Callable[[Sequence[int]], torch.Tensor]
"""Token ids of one sequence -> its logits [length, vocabulary] of any float type, the i-th line for the token that follows i + 1 tokens."""

NEAR_TIE = 1e-4
FEATURES = ("prefix_cache", "chunked_prefill", "speculation", "prompt_logprobs", "graphs", "taps", "deterministic")


class StatePlugin:
    """Offers one ModelState class for every checkpoint, under the name `conformance`."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(self, kind: type[ModelState]) -> None:
        self.kind = kind

    @hookimpl
    def model_state(self) -> Offer[type[ModelState]]:
        return Offer("conformance", lambda: self.kind, reason="the class under test")


@dataclass(frozen=True)
class Plain:
    """What a prompt gives alone, without overlap, chunks or prefix cache. margins: distance of the two best logits at each token."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


class Lab:
    """Checkpoints by seed, and what is worked out from them. Engines are fresh at each call; everything else is made once."""

    def __init__(self, case: StateCase) -> None:
        self.case = case
        self.root = Path(tempfile.mkdtemp(prefix="modelrunner-conformance-"))
        atexit.register(shutil.rmtree, self.root, ignore_errors=True)
        self.checkpoint = cache(self._checkpoint)
        self.reference = cache(self._reference)
        self.plain = cache(self._plain)

    # ---- made once ---------------------------------------------------------------------------------------------------

    def _checkpoint(self, seed: int) -> Path:
        """Written under another name at first, so that each test of a class whose checkpoint fails tells why."""
        begun, folder = Path(tempfile.mkdtemp(dir=self.root)), self.root / f"seed-{seed}"
        self.case.checkpoint(begun, seed)
        return begun.rename(folder)

    def _reference(self, seed: int) -> Reference:
        return self.case.reference(self.checkpoint(seed))

    @cached_property
    def answers(self) -> dict[str, Yes | No]:
        """The state's answer for each feature."""
        state = self.engine(prefix=False, chunked=False).assembly.state
        return {feature: state.supports(feature) for feature in FEATURES}

    def works(self, feature: str) -> bool:
        return isinstance(self.answers[feature], Yes)

    @cached_property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Seven prompts: of one token, around pages, over several pages, two that begin alike for two pages of the largest group."""
        parts = self.engine(prefix=False, chunked=False).assembly
        vocab, page = parts.needs.vocab_size, max([*parts.resolved.tokens_per_page.values(), self.case.page_size])
        lengths = (1, self.case.page_size, page + 1, 17, 23, 3 * page + 3)
        made = [tuple((7 * i * i + 3 * i + 11 * k + 1) % vocab for i in range(n)) for k, n in enumerate(lengths)]
        return *made, (*made[-1][: 2 * page + 1], *made[-2][:5])

    def _plain(self, prompt: tuple[int, ...], seed: int = 0) -> Plain:
        engine = self.engine(seed=seed, depth=1, rows=1, prefix=False, chunked=False)
        trace = StepTrace(engine)
        (tokens,) = self.run(engine, [prompt])
        best = torch.stack([trace.logits["0"][len(prompt) - 1 + i] for i in range(len(tokens))]).topk(2).values
        return Plain(tuple(tokens), tuple((best[:, 0] - best[:, 1]).tolist()))

    # ---- engines -----------------------------------------------------------------------------------------------------

    def settings(self, more: Mapping[str, Any] | None = None, seed: int = 0, **short: Any) -> dict[str, Any]:
        """Settings of an engine on the checkpoint. more: dotted names. short: see `modelrunner.testing.options`."""
        short = {"page_size": self.case.page_size, "rows": 4, "pages": 256, "tokens": 512} | short
        model = {"name": str(self.checkpoint(seed)), "skip_tokenizer_init": not self.case.tokenizer}
        name = self.case.model_state if isinstance(self.case.model_state, str) else "conformance"
        pinned = {"pin.model_state": name, "model.dtype": "float32"}
        return {"model": model} | options(**short) | pinned | dict(self.case.settings) | dict(more or {})

    def start(self, settings: Mapping[str, Any]) -> Engine:
        """An engine with these settings and the class's plugins."""
        from modelrunner.engine import Engine

        kind = self.case.model_state
        own = () if isinstance(kind, str) else (StatePlugin(kind),)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*max_model_len.*")  # small caches are meant
            return Engine(settings, plugins=(*own, *self.case.plugins))

    def engine(self, more: Mapping[str, Any] | None = None, *, seed: int = 0, **short: Any) -> Engine:
        """An engine on the checkpoint; features are on if the state supports them, unless `short` says otherwise."""
        for name, feature in (("prefix", "prefix_cache"), ("chunked", "chunked_prefill")):
            if name not in short:
                short[name] = self.works(feature)
        return self.start(self.settings(more, seed, **short))

    def run(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int] | Mapping[str, Any]],
        probe: Callable[[Driver, EngineProbe], None] | None = None,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Greedy output ids of the prompts, all submitted at once; the engine's books are checked after each step.

        probe: called before each step.
        """
        driver = Driver(engine)
        hooks = EngineProbe(driver) if probe is not None else None
        params = SamplingParams(temperature=0, max_tokens=max_tokens or self.case.max_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            driver.add(str(number), prompt, params)
        while engine.has_unfinished():
            if probe is not None and hooks is not None:
                probe(driver, hooks)
            driver.step()
            assert driver.steps < 2000, "the requests do not end"
        results = [driver.result(str(number)) for number in range(len(prompts))]
        broken = [(number, result.finish_reason) for number, result in enumerate(results) if result.finish_reason != "length"]
        assert not broken, f"requests (number, finish reason) did not run to their length; `error` means that no logit was finite: {broken}"
        return [list(result.token_ids) for result in results]

    def load_version(self, engine: Engine, seed: int) -> None:
        """Load the weights of the checkpoint `seed` into a running engine, as a new version."""
        settings = self.engine(seed=seed).settings
        reader, _ = open_checkpoint(Chooser(engine.assembly.manager, settings))
        engine.update_weights(reader.tensors(), version=f"seed {seed}")

    # ---- comparing ---------------------------------------------------------------------------------------------------

    def assert_plain(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], seed: int = 0) -> None:
        """Each output equals the plain one, or its beginning, up to the first near-tie."""
        for prompt, output in zip(prompts, outputs, strict=True):
            want = self.plain(tuple(prompt), seed)
            assert len(output) <= len(want.tokens), f"{len(output)} output tokens; at most {len(want.tokens)} were asked for"
            differ = [i for i, (a, b) in enumerate(zip(output, want.tokens, strict=False)) if a != b]
            assert not differ or want.margins[differ[0]] < NEAR_TIE, (
                f"output token {differ[0]} of prompt {list(prompt)} is {output[differ[0]]}; run plainly (alone, whole, one step deep) the "
                f"state gives {want.tokens[differ[0]]}, whose logit leads by {want.margins[differ[0]]:.2g}:\n"
                f" got {list(output)}\nwant {list(want.tokens)}"
            )


def transformers_checkpoint(config: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Write a random transformers model of `config` in float32. Norms and biases get noise too, so that none is trivial.

    Raises ValueError, with the configuration, when transformers cannot build such a model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = copy.deepcopy(dict(config))
    model_class: Any = AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            made: Any = AutoConfig.for_model(fields.pop("model_type"), **fields)
            model: Any = model_class.from_config(made, attn_implementation="eager", dtype=torch.float32)
        except Exception as error:
            raise ValueError(
                f"transformers could not build tiny_config {dict(config)}: {type(error).__name__}: {error}; special token ids "
                "(pad_token_id, eos_token_id, bos_token_id), also the family's defaults, must be below vocab_size"
            ) from error
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)


def transformers_reference(folder: Path) -> Reference:
    """The checkpoint run by transformers in float32, a whole sequence at a time."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()

    def reference(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits

    return reference
