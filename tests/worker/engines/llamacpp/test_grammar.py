"""Forms: an answer can be nothing else than what it is held to, and a client's nonsense is refused with a sentence."""

import json
import time

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Guided, GuidedKind
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from services.worker.engines.llamacpp.grammar import KINDS, Form, Forms

QUICK_S_MAX = 5.0


@pytest.fixture(scope="module")
def forms() -> Forms:
    return Forms(ByteTokenizer.token_bytes, [EOS])


def guided(kind: GuidedKind, *texts: str) -> Guided:
    return Guided(kind, texts)


SCHEMA = guided(
    GuidedKind.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}),
)
OBJECT = guided(GuidedKind.JSON_OBJECT)
REGEX = guided(GuidedKind.REGEX, r"^a/\d{2}(é|z+)$")
CHOICE = guided(GuidedKind.CHOICE, "yes", 'no "\\\n', "né😀")
GRAMMAR = guided(GuidedKind.GRAMMAR, 'root ::= list\nlist ::= "[" (item ("," item)*)? "]"\nitem ::= list | [0-9]+\n')
ESCAPES = guided(GuidedKind.GRAMMAR, r'root ::= "\u0041\U0001F600" [\u00e9-\u00ff] [\u002d\u005d] "\u0022\\u0041"')

FITTING = [
    (SCHEMA, '{"é": 12}', '{"é": "x"}'),
    (OBJECT, '{"a": [1, {"b": null}]}', "[1]"),
    (REGEX, "a/12zz", "a/1z"),
    (CHOICE, 'no "\\\n', "no!"),
    (CHOICE, "né😀", "ne"),
    (GRAMMAR, "[1,[23,[]]]", "[1,,2]"),
    (ESCAPES, 'A😀é-"\\u0041', 'A😀é-"A'),
]


def token_ids(text: str) -> list[int]:
    return list(text.encode())


def allows(form: Form, token: int) -> bool:
    return bool(form.allowed()[token >> 3] >> (token & 7) & 1)


def test_every_kind_of_guidance_is_taken() -> None:
    assert {one.kind for one, _, _ in FITTING} == set(KINDS) == set(GuidedKind)


@pytest.mark.parametrize(("form", "fits", "differs"), FITTING)
def test_a_form_allows_what_fits_and_nothing_else(forms: Forms, form: Guided, fits: str, differs: str) -> None:
    state = forms.start(form, ())
    for token in token_ids(fits):
        assert allows(state, token)
        state.take(token)

    assert state.is_complete
    with pytest.raises(Failure) as raised:
        forms.start(form, token_ids(differs))
    assert raised.value.reason is Reason.GRAMMAR_REPLAY_MISMATCH


@pytest.mark.parametrize(("form", "fits", "_"), FITTING)
def test_a_form_that_is_started_after_tokens_stands_where_one_does_that_took_them(
    forms: Forms, form: Guided, fits: str, _: str
) -> None:
    tokens = token_ids(fits)
    state = forms.start(form, ())

    for position, token in enumerate(tokens):
        assert forms.start(form, tokens[:position]).allowed() == state.allowed()
        state.take(token)

    assert forms.start(form, tokens).allowed() == state.allowed()


def test_the_end_is_allowed_when_the_form_is_complete_and_not_before(forms: Forms) -> None:
    state = forms.start(guided(GuidedKind.CHOICE, "no", "no way"), token_ids("n"))
    assert not allows(state, EOS)

    state.take(ord("o"))

    assert allows(state, EOS)
    assert allows(state, ord(" "))


def test_the_white_space_of_json_is_bounded(forms: Forms) -> None:
    state = forms.start(OBJECT, token_ids("{"))
    for _ in range(20):
        state.take(ord("\n"))

    assert not allows(state, ord("\n"))


@pytest.mark.parametrize(
    "endless",
    [guided(GuidedKind.GRAMMAR, 'root ::= ab "b"\nab ::= "a" "b"*'), guided(GuidedKind.GRAMMAR, 'root ::= "a" root')],
)
def test_a_form_that_leaves_one_token_for_ever_is_told_so_token_by_token(forms: Forms, endless: Guided) -> None:
    start = time.process_time()

    state = forms.start(endless, token_ids("a"))
    mask = state.allowed()

    assert sum(byte.bit_count() for byte in mask) == 1
    assert time.process_time() - start < QUICK_S_MAX


REFUSED = {
    "an empty grammar": guided(GuidedKind.GRAMMAR, ""),
    "garbage": guided(GuidedKind.GRAMMAR, "garbage \0 ::"),
    "a grammar without a root": guided(GuidedKind.GRAMMAR, 'a ::= "a"'),
    "a rule that there is not": guided(GuidedKind.GRAMMAR, "root ::= a"),
    "a class that is left open": guided(GuidedKind.GRAMMAR, "root ::= [a"),
    "a range the wrong way round": guided(GuidedKind.GRAMMAR, "root ::= [z-a]"),
    "a character that there is not": guided(GuidedKind.GRAMMAR, r'root ::= "\UFFFFFFFF"'),
    "half a surrogate pair": guided(GuidedKind.CHOICE, "\ud800"),
    "another language inside of a literal": guided(GuidedKind.GRAMMAR, 'root ::= "a\n%llguidance {}"'),
    "a tower of brackets": guided(GuidedKind.GRAMMAR, "root ::= " + "(" * 20_000),
    "a huge grammar": guided(GuidedKind.GRAMMAR, "root ::= " + " ".join(["[a-z]{0,50}"] * 5_000)),
    "an expression with look-ahead": guided(GuidedKind.REGEX, "(?=a)b"),
    "an expression that is left open": guided(GuidedKind.REGEX, "(a"),
    "a tower of groups": guided(GuidedKind.REGEX, "(" * 20_000),
    "no JSON": guided(GuidedKind.JSON_SCHEMA, "nope"),
    "a schema that is no object": guided(GuidedKind.JSON_SCHEMA, "false"),
    "a type that there is not": guided(GuidedKind.JSON_SCHEMA, '{"type": "nope"}'),
    "a schema elsewhere": guided(GuidedKind.JSON_SCHEMA, '{"$ref": "http://example.org/schema"}'),
    "a tower of schemas": guided(GuidedKind.JSON_SCHEMA, '{"items":' * 5_000 + "{}" + "}" * 5_000),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED.keys())
def test_is_refused(forms: Forms, refused: Guided) -> None:
    with pytest.raises(Failure) as raised:
        forms.start(refused, ())

    assert (raised.value.reason, raised.value.param) == (Reason.INVALID_ARGUMENT, "guided")
    assert raised.value.detail.startswith(f"guided.{refused.kind} cannot be used: ")
    assert len(raised.value.detail) < 400


@pytest.mark.parametrize(
    "barren",
    [
        guided(GuidedKind.GRAMMAR, "root ::= root"),
        guided(GuidedKind.GRAMMAR, r"root ::= [^\x00-\U0010FFFF]"),
        guided(GuidedKind.JSON_SCHEMA, '{"$ref": "#"}'),
    ],
)
def test_a_form_that_nothing_fits_is_refused_when_it_is_asked(forms: Forms, barren: Guided) -> None:
    state = forms.start(barren, ())

    with pytest.raises(Failure) as raised:
        state.allowed()

    assert (raised.value.reason, raised.value.param) == (Reason.INVALID_ARGUMENT, "guided")
