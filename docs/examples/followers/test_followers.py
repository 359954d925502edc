"""The drafter through modelrunner's conformance suite; run it with the package installed."""

from itertools import pairwise

from modelrunner.testing.conformance import DrafterConformance


class TestFollowers(DrafterConformance):
    drafter = "followers"

    def test_proposals_have_followed_before(self, monkeypatch):
        driver = self.driver(monkeypatch, depth=1)
        heard = self.listen(driver)
        self.tokens(driver, self.requests())
        assert any(heard.proposals.values())
        for history, proposal in heard.proposals.items():
            pairs = set(pairwise(history))
            assert set(pairwise((history[-1], *proposal))) <= pairs
