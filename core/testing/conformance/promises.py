"""Tests of what a ModelState promises beside its numbers: what it touches, answers, reloads, and never waits for."""

from __future__ import annotations

import re

import pytest
import torch

from modelrunner.errors import PluginError
from modelrunner.graphs import Key
from modelrunner.model_state import No, Yes
from modelrunner.request import SamplingParams
from modelrunner.testing.conformance.case import StateCase
from modelrunner.testing.conformance.lab import FEATURES
from modelrunner.testing.conformance.touch import TouchCheck
from modelrunner.testing.conformance.trace import StepTrace
from modelrunner.testing.conformance.values import forbid_values
from modelrunner.testing.drive import Driver

PADDED = {"graphs.bucket_rows": (3, 6, 9), "graphs.bucket_tokens": (10, 24, 64)}
SWITCHES = {"prefix_cache": "prefix", "chunked_prefill": "chunked"}
LOWER_PRECISION_ERROR = 0.1  # of bfloat16 logits, as a share of their norm


class KeepsItsPromises(StateCase):
    """Part of `ModelStateConformance`."""

    # ---- declare -----------------------------------------------------------------------------------------------------

    def test_touches_what_it_declares(self) -> None:
        """Unwritten memory holds NaN; pages, slots and columns of others stay as they are; padding writes nothing; each layer is used."""
        prompts = self.lab.prompts
        engine = self.lab.engine(PADDED, depth=1, prefix=False, tokens=self.small_step)
        check = TouchCheck(engine)
        outputs = self.lab.run(engine, prompts)
        assert check.padded > 0, "no step was padded"
        assert check.padded < check.steps
        self.lab.assert_plain(prompts, outputs)

    def test_padding_changes_nothing(self) -> None:
        prompts = self.lab.prompts
        outputs = self.lab.run(self.lab.engine(PADDED, tokens=self.small_step, device="deferred_cpu"), prompts)
        self.lab.assert_plain(prompts, outputs)

    def test_graphs_change_nothing(self) -> None:
        """Steps run as closures made once for a shape, whatever mixture of prompts and decode rows it is: what `declare` calls capturable
        must not keep anything of a plan."""
        engine = self.lab.engine(tokens=self.small_step, device="deferred_cpu", captures=True)
        if (reason := engine.runner.graphs.reason) and engine.assembly.needs.capture == "none":
            pytest.skip(f"declared: {reason}")
        assert not reason, reason
        prompts, run = self.lab.prompts, engine.runner.graphs.run
        parts: set[str] = set()

        def noted(key: Key) -> None:
            parts.add(key.part)
            run(key)

        setattr(engine.runner.graphs, "run", noted)  # noqa: B010  (an instance's method)
        self.lab.assert_plain(prompts, self.lab.run(engine, prompts))
        assert parts == {"step", "body", "tail"}, f"of graphs only {parts} ran"

    def test_results_have_the_declared_shapes(self) -> None:
        """Hidden states [tokens, hidden_size]; logits [n, vocab_size] in the model's type."""
        engine = self.lab.engine(depth=1, prefix=False)
        trace = StepTrace(engine)
        self.lab.run(engine, self.lab.prompts[-1:])
        needs = engine.assembly.needs
        wrong = [(got, out) for got, out in trace.shapes if got != out or out[1] != needs.hidden_size]
        assert not wrong, f"(hidden, result) shapes of forward: {wrong}; both must be [tokens, {needs.hidden_size}]"
        assert trace.dtypes == {torch.float32}, f"logits of a float32 model have {trace.dtypes}"
        sizes = {len(logits) for of_request in trace.logits.values() for logits in of_request.values()}
        assert sizes == {needs.vocab_size}, f"logits have {sizes} entries; declared is a vocabulary of {needs.vocab_size}"

    def test_fills_its_context(self) -> None:
        """A request that ends at max_model_len is right to its last token."""
        longest = max(self.lab.prompts, key=len)
        length = len(longest) + self.max_tokens
        engine = self.lab.engine({"model.max_model_len": length}, depth=1, prefix=False)
        assert engine.assembly.resolved.max_model_len == length
        trace = StepTrace(engine)
        self.assert_logits(trace, [longest], self.lab.run(engine, [longest]))

    def test_bfloat16(self) -> None:
        """In bfloat16 the logits are bfloat16 and near the reference's float32 ones."""
        prompts = self.lab.prompts[2:]
        engine = self.lab.engine({"model.dtype": "bfloat16"}, depth=1, prefix=False, rows=8)
        trace = StepTrace(engine)
        self.lab.run(engine, prompts)
        assert trace.dtypes == {torch.bfloat16}, f"logits of a bfloat16 model have {trace.dtypes}"
        for number, prompt in enumerate(prompts):
            want = self.lab.reference(0)(prompt).float()
            got = torch.stack([trace.logits[str(number)][place] for place in range(len(prompt))])
            error = float((got - want).norm() / want.norm())
            assert error < LOWER_PRECISION_ERROR, f"logits of prompt {number} are {error:.3f} of their norm away from the reference's"

    # ---- supports ----------------------------------------------------------------------------------------------------

    def test_answers_for_every_feature(self) -> None:
        """Yes, or No with a reason; also for a feature that does not exist yet."""
        state = self.lab.engine(prefix=False, chunked=False).assembly.state
        for feature in (*FEATURES, "a_feature_of_the_future"):
            answer = state.supports(feature)
            assert isinstance(answer, Yes | No), f"supports({feature!r}) answered {answer!r}; Yes() or No(reason) is needed"
            assert isinstance(answer, Yes) or answer.reason.strip(), f"supports({feature!r}) refuses without a reason"

    @pytest.mark.parametrize("feature", SWITCHES)
    def test_a_refused_feature_is_refused_at_start(self, feature: str) -> None:
        """Where `supports` says Yes, the tests of equal results show that it works."""
        answer = self.lab.answers[feature]
        if isinstance(answer, Yes):
            pytest.skip(f"{feature} is supported")
        with pytest.raises(PluginError, match=re.escape(answer.reason)):
            self.lab.engine(None, **{name: name == SWITCHES[feature] for name in SWITCHES.values()})

    def test_taps(self) -> None:
        """Each declared point is called once a step, in order; what a tap returns is what goes on."""
        if not self.lab.works("taps"):
            pytest.skip("the state refuses taps")
        prompt = self.lab.prompts[3]
        points = self.lab.engine().assembly.needs.tap_points
        if not points:
            pytest.skip("the state declares no tap points")
        calls: list[str] = []

        def logits(change: str = "") -> torch.Tensor:
            def tap(name: str, hidden: torch.Tensor) -> torch.Tensor:
                calls.append(name)
                bump = torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype) if name == change else torch.zeros(())
                return hidden + bump * hidden.std()

            engine = self.lab.engine(depth=1, prefix=False)
            trace = StepTrace(engine, tap)
            self.lab.run(engine, [prompt], max_tokens=1)
            return torch.stack([trace.logits["0"][place] for place in range(len(prompt))])

        plain = logits()
        assert tuple(calls) == points, f"a step calls tap at {calls}; declared are {points}"
        want = self.lab.reference(0)(prompt).float()
        torch.testing.assert_close(plain, want, rtol=self.tolerance, atol=self.tolerance, msg=lambda text: f"with idle taps: {text}")
        for point in points:
            moved = (logits(point) - plain).abs().amax(-1)
            assert (moved > 10 * self.tolerance).all(), f"a vector added at {point!r} does not reach the logits of every token"

    # ---- weights -----------------------------------------------------------------------------------------------------

    def test_new_weights_in_place(self) -> None:
        """Another version of the weights goes into the same memory, and nothing of the old one is left."""
        prompts = self.lab.prompts
        engine = self.lab.engine(device="deferred_cpu", tokens=self.small_step)
        self.lab.assert_plain(prompts, self.lab.run(engine, prompts))
        module = engine.assembly.state.module
        places = {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()}
        self.lab.load_version(engine, 1)
        moved = [name for name, tensor in module.state_dict(keep_vars=True).items() if tensor.data_ptr() != places.get(name)]
        assert not moved, f"tensors that are elsewhere after a reload, where a captured graph would not find them: {moved}"
        assert any(self.lab.plain(prompt, 0).tokens != self.lab.plain(prompt, 1).tokens for prompt in prompts), (
            "checkpoint(folder, seed) gives models for seeds 0 and 1 that answer alike"
        )
        self.lab.assert_plain(prompts, self.lab.run(engine, prompts), seed=1)
        self.lab.load_version(engine, 0)
        self.lab.assert_plain(prompts, self.lab.run(engine, prompts))

    def test_new_weights_while_a_request_runs(self) -> None:
        """Every token after the change is what the new weights give for the tokens before it."""
        prompt = self.lab.prompts[-1]
        driver = Driver(engine := self.lab.engine(device="deferred_cpu", tokens=self.small_step))
        driver.add("0", prompt, SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True))
        driver.step_until(lambda: driver.num_tokens("0") >= 4)
        self.lab.load_version(engine, 1)
        old = len(engine.requests["0"].output_token_ids)
        driver.finish()
        output = list(driver.result("0").token_ids)
        self.lab.assert_plain([prompt], [output[:old]])
        self.lab.assert_plain([[*prompt, *output[:old]]], [output[old:]], seed=1)
        assert len(output) == self.max_tokens > old

    # ---- synchronisation ---------------------------------------------------------------------------------------------

    def test_steps_ask_for_no_values(self) -> None:
        """What a GPU could not do without making the host wait is refused, here on the CPU."""
        engine = self.lab.engine(depth=1, tokens=self.small_step)
        forbid_values(engine)
        self.lab.assert_plain(self.lab.prompts, self.lab.run(engine, self.lab.prompts))

    def test_steps_do_not_synchronise_on_a_gpu(self, synchronisation_is_an_error: None) -> None:
        """The tokens of the CPU, without a wait inside a step (waiting for an earlier step's results is not counted)."""
        engine = self.lab.engine(device="cuda", tokens=self.small_step)
        prompts = self.lab.prompts
        self.lab.run(engine, prompts)
        torch.cuda.set_sync_debug_mode("error")
        outputs = self.lab.run(engine, prompts)
        torch.cuda.set_sync_debug_mode("default")
        self.lab.assert_plain(prompts, outputs)
