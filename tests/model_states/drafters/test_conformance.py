"""Drafters with weights in the conformance suite; that proposals are the papers' is shown in tests/equalities/test_drafters.py."""

from __future__ import annotations

from modelrunner.testing import Subject
from modelrunner.testing.conformance import DrafterConformance
from tests.model_states.drafters.engines import head, subject


class OnTarget(DrafterConformance):
    """Of heads for the tiny target."""

    def target(self) -> Subject:
        return subject()


class TestDraftModel(OnTarget):
    drafter = "draft_model"
    model = head("draft_model")


class TestEagle3(OnTarget):
    drafter = "eagle3"
    model = head("eagle3")


class TestMTP(OnTarget):
    drafter = "mtp"


class TestEagle(OnTarget):
    drafter = "eagle"
    model = head("eagle")


class TestMedusa(OnTarget):
    drafter = "medusa"
    model = head("medusa")
