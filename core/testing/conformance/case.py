"""What a test class says of the ModelState that it tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from modelrunner.model_state import ModelState
from modelrunner.testing.conformance.lab import Lab, Reference, transformers_checkpoint, transformers_reference
from modelrunner.testing.conformance.trace import StepTrace


def _explain(number: int, places: Sequence[int], got: torch.Tensor, want: torch.Tensor, tolerance: float) -> Callable[[str], str]:
    """What `assert_close` is to say: which of the compared `places` differ first, and how many do. got, want: [places, vocabulary]."""

    def explain(text: str) -> str:
        if got.shape != want.shape:
            return f"logits of prompt {number} against the reference: {text}"
        differ = (~torch.isclose(got, want, rtol=tolerance, atol=tolerance)).any(-1).nonzero()[:, 0].tolist()
        where = f"differ first at position {places[differ[0]]}, and at {len(differ)} of {len(places)} positions" if differ else "differ"
        return f"logits of prompt {number} {where}, from the reference's: {text}"

    return explain


class StateCase:
    """The subclass interface of `ModelStateConformance` and `MatchesReference`; documented at the former."""

    model_state: ClassVar[type[ModelState] | str]
    plugins: ClassVar[Sequence[object]] = ()
    settings: ClassVar[Mapping[str, Any]] = {}
    page_size: ClassVar[int] = 4
    max_tokens: ClassVar[int] = 16
    tokenizer: ClassVar[bool] = False
    tolerance: ClassVar[float] = 1e-4

    def tiny_config(self) -> Mapping[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} must define tiny_config() -> mapping, or checkpoint() and reference()")

    def checkpoint(self, folder: Path, seed: int) -> None:
        transformers_checkpoint(self.tiny_config(), folder, seed)

    def reference(self, folder: Path) -> Reference:
        return transformers_reference(folder)

    @pytest.fixture
    def synchronisation_is_an_error(self) -> Iterator[None]:
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        yield
        torch.cuda.set_sync_debug_mode("default")

    @property
    def lab(self) -> Lab:
        """Shared by the tests of one class."""
        cls = type(self)
        if "_lab" not in vars(cls):
            cls._lab = Lab(self)  # type: ignore[attr-defined]
        lab: Lab = vars(cls)["_lab"]
        return lab

    def assert_logits(self, trace: StepTrace, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        """Logits at every computed position are near the reference's for the same tokens."""
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            want = self.lab.reference(0)([*prompt, *output]).float()
            got = trace.logits[str(number)]
            assert sorted(got)[-1] == len(prompt) + len(output) - 2, "a trace ends at the last token that something was sampled after"
            places = sorted(got)
            ours, theirs = torch.stack([got[place] for place in places]), want[places]
            torch.testing.assert_close(
                ours,
                theirs,
                rtol=self.tolerance,
                atol=self.tolerance,
                msg=_explain(number, places, ours, theirs, self.tolerance),
            )

    @property
    def small_step(self) -> int:
        """Query tokens of a step that cuts prompts into chunks, if the state allows that."""
        return 13 if self.lab.works("chunked_prefill") else 512
