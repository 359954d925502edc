"""What is refused at the door, in which words, and what becomes of the rest."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelrunner.checkpoint import ModelCard
from modelrunner.errors import CheckpointError, RequestError
from modelrunner.request import OutputKind, Request, SamplingParams, default_params, make_request, merged_eos
from modelrunner.testing.byte_tokenizer import BOS, EOS, ByteTokenizer

VOCAB = 331
CONTEXT = 32
TOKENIZER = ByteTokenizer(VOCAB)


def card(**fields: Any) -> ModelCard:
    return ModelCard("m", Path("/models/m"), "dummy", ("X",), "x", **fields)


def make(prompt: Any, params: SamplingParams | None = None, **options: Any) -> Request:
    defaults: dict[str, Any] = {
        "card": card(),
        "tokenizer": TOKENIZER,
        "vocab_size": VOCAB,
        "max_model_len": CONTEXT,
        "seed": 7,
        "now": 100.0,
    }
    return make_request(options.pop("request_id", "a"), prompt, params or SamplingParams(), **{**defaults, **options})


# ---- sampling parameters ---------------------------------------------------------------------------------------------

REFUSED = [
    ("temperature", math.nan), ("temperature", math.inf), ("temperature", -0.1), ("temperature", True), ("temperature", "1"),
    ("temperature", 10**400), ("temperature", 1e39), ("temperature", None),
    ("top_p", 0), ("top_p", -0.1), ("top_p", 1.5), ("top_p", math.nan),
    ("top_k", -2), ("top_k", 1.0), ("top_k", True), ("top_k", 2**31), ("min_p", -1), ("min_p", 1.1), ("min_p", math.nan),
    ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 10**20), ("seed", "7x"), ("seed", 1.0),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2.0), ("max_tokens", True), ("max_tokens", math.nan),
    ("stop", [""]), ("stop", ["a", 5]), ("stop", 5), ("stop", ""),
    ("stop_token_ids", [3, -1]), ("stop_token_ids", [True]), ("stop_token_ids", "12"), ("stop_token_ids", 5),
    ("stop_token_ids", np.array(5)),
    ("ignore_eos", 1), ("detokenize", "no"), ("output_kind", "some"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}={str(value)[:12]}" for name, value in REFUSED])
def test_a_bad_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got .*accepted: ") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, RequestError)
    message = str(caught.value)
    assert json.loads(json.dumps({"message": message}))["message"] == message
    assert len(message) < 200
    assert "nan" not in message.lower()
    assert "inf;" not in message


def test_an_unknown_parameter_is_refused_with_near_names() -> None:
    with pytest.raises(RequestError, match=r"'temprature' is not a sampling parameter; did you mean temperature\? \(accepted: .*top_p"):
        SamplingParams(temprature=1.0)
    with pytest.raises(RequestError, match="'best_of' is not a sampling parameter"):
        SamplingParams(best_of=1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("guided_json", "structured_outputs={'json': ...}"),
        ("max_new_tokens", "max_tokens"),
        ("use_beam_search", "LLM.beam_search"),
    ],
)
def test_names_of_other_engines_are_told_ours(name: str, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: 1})
    assert f"did you mean {told}? (accepted: " in str(caught.value)


def test_every_wrong_parameter_is_named_at_once() -> None:
    with pytest.raises(RequestError, match=r"top_p: got 2; .*top_k: got -5; "):
        SamplingParams(top_p=2, top_k=-5)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize is False"):
        SamplingParams(stop="x", detokenize=False)


def test_legal_extremes() -> None:
    params = SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=1, seed=2**63 - 1, max_tokens=None, stop=None, stop_token_ids=None)
    assert (params.temperature, params.seed, params.stop, params.stop_token_ids) == (0.0, 2**63 - 1, (), ())
    assert SamplingParams(temperature=1e-5, seed=-(2**63)).seed == -(2**63)


def test_values_are_normalised() -> None:
    params = SamplingParams(
        stop="a", stop_token_ids=[np.int64(3), 3, 4], top_k=np.int32(5), temperature=np.float32(0.5), output_kind="delta"
    )
    assert params.stop == ("a",)
    assert params.stop_token_ids == (3, 4)
    assert type(params.top_k) is int
    assert params.output_kind is OutputKind.DELTA
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")


def test_parameters_are_immutable_hashable_and_picklable() -> None:
    params = SamplingParams(stop=["a"])
    with pytest.raises(ValueError, match="frozen"):
        params.temperature = 2.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params
    assert len({params, SamplingParams(stop=["a"])}) == 1


def test_a_copy_with_changes_is_checked_like_a_new_one() -> None:
    """A plain "delta" was kept as text, which is not OutputKind.DELTA, and acted as cumulative."""
    params = SamplingParams(temperature=0.5, stop=["a"], extra_args={"x": [1]})
    changed = params.model_copy(update={"output_kind": "delta", "top_k": np.int64(5)})
    assert changed == SamplingParams(temperature=0.5, stop=["a"], extra_args={"x": [1]}, output_kind="delta", top_k=5)
    assert changed.output_kind is OutputKind.DELTA
    assert changed.model_fields_set == {"temperature", "stop", "extra_args", "output_kind", "top_k"}
    for update, message in (
        ({"output_kind": "dleta"}, "output_kind: got 'dleta'; accepted: 'cumulative', 'delta', 'final_only'"),
        ({"temprature": 1.0}, "'temprature' is not a sampling parameter"),
        ({"detokenize": False}, "detokenize is False"),
    ):
        with pytest.raises(RequestError, match=message):
            params.model_copy(update=update)
    assert params.model_copy() == params
    copied = params.model_copy(deep=True, update={"seed": 1})
    assert copied.extra_args["x"] == [1]
    assert copied.extra_args["x"] is not params.extra_args["x"]


def test_defaults_come_from_generation_config() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_length": 99, "do_sample": True}
    assert default_params(card(generation=generation)) == SamplingParams(temperature=0.6, top_k=20)
    assert make([5], None, card=card(generation=generation)).params.temperature == 1.0, "given parameters are taken as they are"
    with pytest.raises(CheckpointError, match=r"/models/m.*generation_config\.json: top_p: got 3"):
        default_params(card(generation={"top_p": 3}))


def test_end_of_sequence_ids_are_merged() -> None:
    source = card(generation={"eos_token_id": [9, 8]}, config={"eos_token_id": 7})
    assert merged_eos(source, TOKENIZER) == (9, 8, 7, EOS)
    assert merged_eos(card(config={"eos_token_id": None}), None) == ()
    assert merged_eos(card(config={"eos_token_id": [-1, 10**20, 5]}), None) == (5,)


@pytest.mark.parametrize("value", ["x", {}, 1.5, [2, "x"], True], ids=str)
def test_end_of_sequence_ids_that_are_none(value: Any) -> None:
    """They ended the engine's first request with a bare ValueError, or were rounded."""
    with pytest.raises(CheckpointError, match=r"/models/m: eos_token_id is .*; a token id or a list of them is needed"):
        merged_eos(card(generation={"eos_token_id": value}), None)


# ---- requests --------------------------------------------------------------------------------------------------------


def test_prompts_in_every_form() -> None:
    text = make("hi")
    assert (text.prompt, text.prompt_token_ids) == ("hi", TOKENIZER.encode("hi"))
    for prompt in ([5, 6], (5, 6), np.array([5, 6], np.int32), {"prompt_token_ids": [5, 6]}, [np.int64(5), 6]):
        request = make(prompt)
        assert (request.prompt, request.prompt_token_ids) == (None, [5, 6])
        assert all(type(item) is int for item in request.prompt_token_ids)
    assert make({"prompt": "hi", "cache_salt": "s"}).cache_salt == "s"
    assert make([5], cache_salt="t").cache_salt == "t"


def test_limit_seed_and_deadline() -> None:
    assert make([5] * 4, SamplingParams(max_tokens=3)).limit == 7
    assert make([5] * 4, SamplingParams(max_tokens=10**9)).limit == CONTEXT
    assert make([5] * 4, SamplingParams(max_tokens=None)).limit == CONTEXT
    assert make([5] * (CONTEXT - 1)).limit == CONTEXT
    assert make([5], SamplingParams(seed=0)).seed == 0
    assert make([5]).seed == 7
    assert make([5], deadline=2).deadline == 102.0
    assert make([5], deadline=365 * 86400).deadline == 100 + 365 * 86400


def test_stop_ids() -> None:
    assert make([5], SamplingParams(stop_token_ids=[9])).stop_ids == (EOS, 9)
    assert make([5], SamplingParams(stop_token_ids=[9], ignore_eos=True)).stop_ids == (9,)
    assert make([5], SamplingParams(stop_token_ids=[EOS], ignore_eos=True)).stop_ids == (EOS,)


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], r"prompt: it is empty \(0 tokens\)"),
    ({"prompt_token_ids": []}, "it is empty"),
    ([5] * CONTEXT, r"prompt: 32 tokens; accepted: at most 31, since max_model_len is 32"),
    ([5, VOCAB, -1], r"got 331 at position 1; accepted: 0 to 330"),
    ([5, 6, -1], r"got -1 at position 2; accepted: 0 to 330"),
    ([2**70], "accepted: 0 to 330"),
    ([5, 6.0], r"got 6\.0 at position 1; accepted: integers"),
    ([True], "got True at position 0"),
    (["a"], "got 'a' at position 0"),
    ([[5]], "got a list of length 1 at position 0"),
    (np.array([[5]]), "at position 0"),
    (np.array(5), r"prompt: got array\(5\); accepted: text"),
    (5, "prompt: got 5; accepted: text, a list of token ids"),
    (b"hi", "prompt: got b'hi'"),
    (None, "prompt: got None"),
    ("a\ud800", "character 1 is a lone surrogate"),
    ({}, "needs exactly one of the keys"),
    ({"prompt": "a", "prompt_token_ids": [5]}, "needs exactly one of the keys"),
    ({"prompt": "a", "salt": "x"}, "unknown key 'salt'; accepted: prompt, prompt_token_ids, cache_salt"),
    ({"prompt_token_ids": "abc"}, "prompt: got 'abc'"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt: got ''"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt: got 5"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[message[:30] for _, message in BAD_PROMPTS])
def test_a_bad_prompt_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(prompt)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"request_id": ""}, "request id: got ''"),
    ({"request_id": 5}, "request id: got 5"),
    ({"request_id": None}, "request id: got None"),
    ({"cache_salt": ""}, "cache_salt: got ''"),
    ({"cache_salt": 5}, "cache_salt: got 5"),
    ({"priority": 1.5}, r"priority: got 1\.5"),
    ({"priority": True}, "priority: got True"),
    ({"priority": 2**63}, "priority: got 9223372036854775808"),
    ({"deadline": 0}, "deadline: got 0"),
    ({"deadline": -1.0}, "deadline: got -1"),
    ({"deadline": math.nan}, "deadline: got a number that is not finite"),
    ({"deadline": math.inf}, "deadline: got a number that is not finite"),
    ({"deadline": "1"}, "deadline: got '1'"),
    (
        {"deadline": 1764500000.3},
        r"deadline: got 1764500000\.3; accepted: seconds from now, .* such as time\.time",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[str(options) for options, _ in BAD_OPTIONS])
def test_a_bad_argument_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make([BOS, 5], **options)


def test_what_needs_text_is_refused_without_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"skip_tokenizer_init=True.*prompt_token_ids"):
        make("hi", tokenizer=None)
    with pytest.raises(RequestError, match="stop: stop strings need text"):
        make([5], SamplingParams(stop="x"), tokenizer=None)
    assert make([5], SamplingParams(), tokenizer=None).eos_token_ids == ()


def test_params_of_another_kind_are_refused() -> None:
    with pytest.raises(RequestError, match="sampling_params: got a dict of length 1; accepted: a SamplingParams"):
        make([5], {"temperature": 1})  # type: ignore[arg-type]


def test_a_cache_salt_given_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="given both in the prompt and as an argument"):
        make({"prompt": "a", "cache_salt": "s"}, cache_salt="s")
