"""Conformance suites for plugins, as pytest classes: subclass one in a test file, say what is to be tested, and run pytest.

This package needs pytest; `modelrunner.testing` itself does not.
"""

import pytest

for _module in (
    "case",
    "device",
    "drafter",
    "kernel",
    "kernel_cases",
    "lab",
    "linear_scheme",
    "logits_processor",
    "media",
    "model_state",
    "promises",
    "step_cases",
    "touch",
    "trace",
    "values",
):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from modelrunner.testing.conformance.device import DeviceConformance  # noqa: E402
from modelrunner.testing.conformance.drafter import DrafterConformance  # noqa: E402
from modelrunner.testing.conformance.kernel import KernelConformance  # noqa: E402
from modelrunner.testing.conformance.kernel_cases import Draw  # noqa: E402
from modelrunner.testing.conformance.lab import Reference, transformers_checkpoint, transformers_reference  # noqa: E402
from modelrunner.testing.conformance.linear_scheme import LinearSchemeConformance  # noqa: E402
from modelrunner.testing.conformance.logits_processor import LogitsProcessorConformance  # noqa: E402
from modelrunner.testing.conformance.media import MediaReference, TakesMedia  # noqa: E402
from modelrunner.testing.conformance.model_state import MatchesReference, ModelStateConformance  # noqa: E402

__all__ = [
    "DeviceConformance",
    "DrafterConformance",
    "Draw",
    "KernelConformance",
    "LinearSchemeConformance",
    "LogitsProcessorConformance",
    "MatchesReference",
    "MediaReference",
    "ModelStateConformance",
    "Reference",
    "TakesMedia",
    "transformers_checkpoint",
    "transformers_reference",
]
