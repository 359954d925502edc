"""Conformance suites for plugins, as pytest classes: subclass one in a test file, say what is to be tested, and run pytest.

This package needs pytest; `modelrunner.testing` itself does not.
"""

import pytest

for _module in ("case", "lab", "model_state", "promises", "touch", "trace", "values"):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from modelrunner.testing.conformance.lab import Reference, transformers_checkpoint, transformers_reference  # noqa: E402
from modelrunner.testing.conformance.model_state import MatchesReference, ModelStateConformance  # noqa: E402

__all__ = ["MatchesReference", "ModelStateConformance", "Reference", "transformers_checkpoint", "transformers_reference"]
