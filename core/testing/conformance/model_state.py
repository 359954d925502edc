"""The conformance suite of a ModelState, as a pytest class to subclass."""

from __future__ import annotations

import pytest

from modelrunner.testing.conformance.case import StateCase
from modelrunner.testing.conformance.lab import NEAR_TIE
from modelrunner.testing.conformance.promises import KeepsItsPromises
from modelrunner.testing.conformance.trace import StepTrace
from modelrunner.testing.drive import Driver
from modelrunner.testing.probe import EngineProbe


class MatchesReference(StateCase):
    """Logits and greedy tokens of a ModelState against a reference: the short suite, for variants of a family that has passed the long one.

    To be told by a subclass, as for `ModelStateConformance`.
    """

    def test_logits_equal_the_reference(self) -> None:
        """At every position of prompts and outputs, whole prompts in one batch."""
        engine = self.lab.engine(depth=1, prefix=False, rows=8)
        trace = StepTrace(engine)
        outputs = self.lab.run(engine, self.lab.prompts)
        want = self.lab.reference(0)(self.lab.prompts[-1]).float()
        assert want.std() > 0.1, (
            f"the reference's logits have a standard deviation of {want.std():.2g}, which must be above 0.1: too flat an answer to prove "
            "anything. Raise initializer_range in tiny_config (0.15 does for most), or change the family's own output scale: raise one "
            "that multiplies, such as logit_scale, lower one that divides, such as logits_scaling"
        )
        self.assert_logits(trace, self.lab.prompts, outputs)

    def test_greedy_tokens_equal_the_reference(self) -> None:
        """If each output token is the reference's best one after those before it, the reference decodes to the same tokens."""
        prompts = self.lab.prompts
        outputs = self.lab.run(self.lab.engine(device="deferred_cpu", tokens=self.small_step), prompts)
        compared = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            best = self.lab.reference(0)([*prompt, *output]).float()[len(prompt) - 1 : -1].topk(2)
            for place, token in enumerate(output):
                if best.values[place, 0] - best.values[place, 1] < NEAR_TIE:
                    break
                assert token == best.indices[place, 0], (
                    f"output token {place} of prompt {list(prompt)} is {token}; the reference has {best.indices[place].tolist()}"
                )
                compared += 1
        assert compared >= 0.8 * len(prompts) * self.max_tokens, f"only {compared} tokens lie before the first near-tie of their request"


class ModelStateConformance(MatchesReference, KeepsItsPromises):
    """Every promise of a ModelState that can be tested without knowing the family. Subclass it in a test file:

        from modelrunner.testing.conformance import ModelStateConformance

        class TestMyModel(ModelStateConformance):
            model_state = "my_model"                  # name of your offer (the plugin is installed), or the ModelState class itself

            def tiny_config(self):                    # fields of a configuration that transformers knows
                return {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15}

    An architecture that transformers does not know replaces `tiny_config` by two methods:

        def checkpoint(self, folder, seed): ...       # write config.json and safetensors of random weights; other weights for another seed
        def reference(self, folder): ...              # -> a callable: ids of one sequence -> logits [length, vocabulary]

    Class attributes, all optional but the first:

    model_state: as above. A class is offered by a plugin of the suite's own for every checkpoint.
    plugins: more plugin objects or module names, as for `Engine`. settings: more settings, by dotted names.
    tokenizer (False): whether engines have the one that a plugin offers. page_size (4): tokens a page. max_tokens (16): output tokens of
    a request. The context must hold three pages of the group with the most tokens a page, and these. tolerance (1e-4): relative and
    absolute, of logits in float32.

    What fails says which promise was broken. Tests of a feature that `supports` refuses test the refusal instead.
    """

    def test_depth(self) -> None:
        """Steps in flight change nothing, whenever the device runs them."""
        prompts = self.lab.prompts
        for depth in (1, 2, 3):
            for seed in (0, 1):
                engine = self.lab.engine(depth=depth, device="deferred_cpu", device_seed=seed, tokens=self.small_step)
                self.lab.assert_plain(prompts, self.lab.run(engine, prompts))

    def test_batch(self) -> None:
        """Neighbours, and their order, change nothing."""
        prompts = self.lab.prompts
        for order in (prompts, prompts[::-1]):
            for rows in (2, 8):
                self.lab.assert_plain(order, self.lab.run(self.lab.engine(rows=rows, device="deferred_cpu"), order))

    def test_chunks(self) -> None:
        """A prompt read in chunks equals the whole prompt, in logits and in tokens."""
        if not self.lab.works("chunked_prefill"):
            pytest.skip("the state refuses chunked_prefill")
        prompts = self.lab.prompts
        for tokens in (5, 13):
            self.lab.assert_plain(prompts, self.lab.run(self.lab.engine(tokens=tokens, device="deferred_cpu"), prompts))
        engine = self.lab.engine(depth=1, prefix=False, tokens=7)
        trace = StepTrace(engine)
        self.assert_logits(trace, prompts, self.lab.run(engine, prompts))

    def test_prefix_cache(self) -> None:
        """What is found in the cache equals what would be computed."""
        if not self.lab.works("prefix_cache"):
            pytest.skip("the state refuses prefix_cache")
        prompts = self.lab.prompts
        engine = self.lab.engine(device="deferred_cpu", tokens=self.small_step)
        probe = EngineProbe(Driver(engine))
        probe.poison_freed_pages()
        self.lab.assert_plain(prompts, self.lab.run(engine, prompts))
        before = probe.counters().cached_tokens
        self.lab.assert_plain(prompts, self.lab.run(engine, prompts))
        assert probe.counters().cached_tokens > before, "no prompt found its pages again, though all had run before"
        probe.assert_clean()

    @pytest.mark.parametrize("prefix", [False, True])
    def test_preempted_and_resumed(self, prefix: bool) -> None:
        """A request that lost its row and pages goes on as if nothing had happened; freed pages are filled with NaN."""
        if prefix and not self.lab.works("prefix_cache"):
            pytest.skip("the state refuses prefix_cache")
        prompts = self.lab.prompts
        engine = self.lab.engine(device="deferred_cpu", tokens=self.small_step, prefix=prefix)

        def disturb(driver: Driver, probe: EngineProbe) -> None:
            if driver.steps == 0:
                probe.poison_freed_pages()
            if driver.steps % 3 == 2:
                probe.drain()
                running = [name for name in engine.requests if probe.row_of(name) >= 0]
                if running and driver.steps < 30:
                    probe.preempt(running[driver.steps % len(running)])

        self.lab.assert_plain(prompts, self.lab.run(engine, prompts, disturb))
        assert engine.scheduler.stats.preemptions >= 3
