"""The arguments of a request for TensorRT-LLM: every field is mapped, and none is silently ignored."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import fields, replace

from services.core.errors import Failure, Reason
from services.core.request import Guided, GuidedKind, Request, Sampling, Stop
from services.worker.engines.trtllm.sampling_params import (
    GenerateArguments,
    ModelFacts,
    answer_end_ids,
    generate_arguments,
    guided_kinds,
    tokens_left,
)
from tests.support.doubles import make_request

END, TURN_END = 256, 300
FACTS = ModelFacts(context_length=100, vocab_size=400, end_ids=(END,), guided_backend="xgrammar")
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.7)
PLAIN = {
    "detokenize": False,
    "max_tokens": 16,
    "top_k": 1,
    "end_id": END,
    "pad_id": END,
    "ignore_eos": False,
    "stop_token_ids": None,
}
"""The arguments of a greedy request with default fields."""
DRAWN: dict[str, Any] = {"temperature": 0.7, "top_p": 1.0, "top_k": 0}
CARD = "is checked against the model card"
ABOVE = "is settled above the worker: see services/worker/validate.py"


@dataclass(frozen=True)
class Row:
    """One case of a field.

    `given`: the value instead of the default. `sampling`: the changes to PLAIN. `refused`: the param of the refusal.
    `nothing`: why the field may have no effect.
    """

    given: Any = None
    sampling: dict[str, Any] = field(default_factory=dict)
    guided: dict[str, Any] | None = None
    bias: tuple[tuple[int, float], ...] = ()
    token_ids: list[int] = field(default_factory=lambda: [1, 2])
    refused: str | None = None
    nothing: str | None = None
    base: Sampling = GREEDY


TABLE: dict[tuple[type, str], list[Row]] = {
    (Request, "model"): [Row(nothing=CARD)],
    (Request, "text"): [Row(nothing=ABOVE)],
    (Request, "messages"): [Row(nothing=ABOVE)],
    (Request, "n"): [Row(nothing=ABOVE)],
    (Request, "parts"): [Row(nothing=ABOVE)],
    (Request, "choice"): [Row(3, nothing="matters only for draws by a seed, which this engine does not support")],
    (Request, "token_ids"): [Row((7, 8, 9), token_ids=[7, 8, 9])],
    (Request, "generated_token_ids"): [Row((5, 6), {"max_tokens": 14}, token_ids=[1, 2, 5, 6])],
    (Request, "generated_choices"): [Row(nothing=ABOVE)],
    (Request, "logprobs"): [Row(0, {"logprobs": 1}), Row(1, {"logprobs": 1}), Row(20, {"logprobs": 20})],
    (Request, "guided"): [Row(Guided(GuidedKind.JSON_OBJECT), guided={"json_object": True})],
    (Request, "sampling"): [Row(SAMPLED, DRAWN)],
    (Request, "stop"): [Row(Stop(max_tokens=3), {"max_tokens": 3})],
    (Sampling, "temperature"): [
        Row(0.0),
        Row(0.7, DRAWN),
        Row(2.0, DRAWN | {"temperature": 2.0}),
        Row(0.01, DRAWN | {"temperature": 0.01}),
        Row(0.0099),
        Row(1e-300),
    ],
    (Sampling, "top_p"): [Row(0.5), Row(0.5, DRAWN | {"top_p": 0.5}, base=SAMPLED)],
    (Sampling, "top_k"): [
        Row(5),
        Row(5, DRAWN | {"top_k": 5}, base=SAMPLED),
        Row(2**32 - 1, DRAWN, base=SAMPLED),
    ],
    (Sampling, "min_p"): [Row(0.1, refused="min_p"), Row(0.1, refused="min_p", base=SAMPLED)],
    (Sampling, "seed"): [Row(7), Row(7, refused="seed", base=SAMPLED)],
    (Sampling, "presence_penalty"): [Row(0.5, refused="presence_penalty")],
    (Sampling, "frequency_penalty"): [Row(-0.5, refused="frequency_penalty")],
    (Sampling, "repetition_penalty"): [Row(1.1, refused="repetition_penalty")],
    (Sampling, "logit_bias"): [Row(((5, 1.5), (6, -100.0)), bias=((5, 1.5), (6, -100.0)))],
    (Stop, "strings"): [Row(("x",), nothing="the frontend looks for them in the text")],
    (Stop, "token_ids"): [Row((9, 7), {"stop_token_ids": [7, 9]}), Row((END,))],
    (Stop, "ignore_eos"): [Row(True, {"ignore_eos": True})],
    (Stop, "min_tokens"): [Row(5, {"min_tokens": 5}), Row(0)],
    (Stop, "max_tokens"): [Row(7, {"max_tokens": 7}), Row(99, {"max_tokens": 98})],
    (Stop, "max_tokens_default"): [Row(16, nothing=ABOVE)],
    (Guided, "kind"): [
        Row(GuidedKind.JSON_OBJECT, guided={"json_object": True}),
        Row(GuidedKind.JSON_SCHEMA, guided={"json": '"a"'}),
        Row(GuidedKind.REGEX, guided={"regex": '"a"'}),
        Row(GuidedKind.GRAMMAR, guided={"grammar": '"a"'}),
        Row(GuidedKind.CHOICE, guided={"regex": '("a")'}),
    ],
    (Guided, "texts"): [Row(("a b", "c+"), guided={"regex": r"(a b|c\+)"})],
}


def build(owner: type, name: str, row: Row) -> Request:
    """A greedy request with this value of the field."""
    request = make_request(sampling=row.base)
    if owner is Request:
        return replace(request, **{name: row.given})
    if owner is Guided:
        guided = Guided(row.given, ('"a"',)) if name == "kind" else Guided(GuidedKind.CHOICE, row.given)
        return replace(request, guided=guided)
    part = "sampling" if owner is Sampling else "stop"
    return replace(request, **{part: replace(getattr(request, part), **{name: row.given})})


def test_table_has_every_field_of_a_request() -> None:
    """A new field without a row would be ignored silently."""
    known = {(owner, one.name) for owner in (Request, Sampling, Stop, Guided) for one in fields(owner)}

    assert set(TABLE) == known
    assert {row.given for row in TABLE[Guided, "kind"]} == set(GuidedKind)


@pytest.mark.parametrize(
    ("owner", "name", "row"),
    [(owner, name, row) for (owner, name), rows in TABLE.items() for row in rows if row.given is not None],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_each_field_maps_to_the_arguments_in_the_table(owner: type, name: str, row: Row) -> None:
    request = build(owner, name, row)

    if row.refused is None:
        expected = PLAIN | row.sampling
        if "temperature" not in row.sampling and row.base is SAMPLED:
            expected |= DRAWN
        assert generate_arguments(request, FACTS) == GenerateArguments(
            token_ids=row.token_ids, sampling=expected, guided=row.guided, bias=row.bias
        )
    else:
        assert refused(request) == row.refused


def refused(request: Request, facts: ModelFacts = FACTS) -> str | None:
    with pytest.raises(Failure) as caught:
        generate_arguments(request, facts)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    return caught.value.param


# Greedy and sampled


def test_greedy_sampling_is_passed_explicitly() -> None:
    assert generate_arguments(make_request(sampling=GREEDY), FACTS).sampling["top_k"] == 1


def test_all_sampling_parameters_are_passed_explicitly() -> None:
    sampling = generate_arguments(make_request(sampling=Sampling(temperature=1.0)), FACTS).sampling

    assert {name: sampling[name] for name in ("temperature", "top_p", "top_k")} == DRAWN | {"temperature": 1.0}


# After a migration


def test_limits_are_reduced_by_the_tokens_before_a_migration() -> None:
    moved = make_request(max_tokens=10, min_tokens=6).after([5, 5, 5, 5])

    sampling = generate_arguments(moved, FACTS).sampling

    assert (sampling["max_tokens"], sampling["min_tokens"]) == (6, 2)


def test_min_tokens_is_left_out_once_reached() -> None:
    assert "min_tokens" not in generate_arguments(make_request(min_tokens=2).after([5, 5]), FACTS).sampling


@pytest.mark.parametrize(
    ("prompt", "generated", "left"), [(2, 0, 16), (2, 16, 0), (90, 0, 10), (90, 10, 0), (90, 7, 3), (99, 0, 1)]
)
def test_tokens_left_are_bounded_by_the_limit_and_the_context(prompt: int, generated: int, left: int) -> None:
    request = make_request((1,) * prompt).after([5] * generated)

    assert tokens_left(request, FACTS.context_length) == left


# Ends


def test_all_end_tokens_of_the_model_are_passed() -> None:
    """The engine supports one end id; chat models have another one for the end of a turn."""
    facts = ModelFacts(context_length=100, vocab_size=400, end_ids=(END, TURN_END))

    sampling = generate_arguments(make_request(stop_token_ids=(9,)), facts).sampling

    assert (sampling["end_id"], sampling["stop_token_ids"]) == (END, [9, TURN_END])
    assert answer_end_ids(make_request(stop_token_ids=(9,)), facts.end_ids) == {END, TURN_END, 9}


def test_ignore_eos_leaves_only_the_clients_stop_tokens() -> None:
    facts = ModelFacts(context_length=100, vocab_size=400, end_ids=(END, TURN_END))
    request = make_request(ignore_eos=True, stop_token_ids=(9,))

    sampling = generate_arguments(request, facts).sampling

    assert (sampling["ignore_eos"], sampling["stop_token_ids"]) == (True, [9])
    assert answer_end_ids(request, facts.end_ids) == {9}


@pytest.mark.parametrize("facts", [FACTS, ModelFacts(context_length=100, vocab_size=400, end_ids=(1, 2))])
def test_min_tokens_with_several_end_tokens_is_refused(facts: ModelFacts) -> None:
    stop_token_ids = (9,) if facts is FACTS else ()

    assert refused(make_request(min_tokens=5, stop_token_ids=stop_token_ids), facts) == "min_tokens"


def test_min_tokens_without_any_end_token_is_left_out() -> None:
    assert "min_tokens" not in generate_arguments(make_request(min_tokens=5, ignore_eos=True), FACTS).sampling


def test_stop_strings_never_reach_the_engine() -> None:
    assert "stop" not in generate_arguments(make_request(strings=("x",)), FACTS).sampling


# Guided


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_guided_with_a_suppressed_end_token_is_refused(field: dict[str, Any]) -> None:
    """In 1.2, a grammar that allows no token crashes the engine."""
    assert refused(make_request(guided=Guided(GuidedKind.JSON_OBJECT), **field)) == "guided"


def test_guided_is_refused_without_a_backend() -> None:
    facts = ModelFacts(context_length=100, vocab_size=400, end_ids=(END,))

    assert refused(make_request(guided=Guided(GuidedKind.JSON_OBJECT)), facts) == "guided"
    assert guided_kinds(None) == ()


def test_grammar_field_is_refused_with_the_llguidance_backend() -> None:
    facts = ModelFacts(context_length=100, vocab_size=400, end_ids=(END,), guided_backend="llguidance")

    assert refused(make_request(guided=Guided(GuidedKind.GRAMMAR, ('root ::= "a"',))), facts) == "guided"
    assert set(guided_kinds("xgrammar")) - set(guided_kinds("llguidance")) == {GuidedKind.GRAMMAR}


@pytest.mark.parametrize("text", ["plain", "a.b", "(x)|[y]", "$1^2", r"back\slash", "a b-c", "{}", "漢字 🎉", "\n"])
def test_regular_expression_of_a_choice_matches_only_that_text(text: str) -> None:
    arguments = generate_arguments(make_request(guided=Guided(GuidedKind.CHOICE, (text, "other"))), FACTS)

    assert arguments.guided is not None
    assert re.fullmatch(arguments.guided["regex"], text)
    assert not re.fullmatch(arguments.guided["regex"], text + "x")
    assert not re.fullmatch(arguments.guided["regex"], text[1:] + "!")
