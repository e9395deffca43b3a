"""Grammars: a guided answer always matches its grammar, and an invalid grammar is refused with a clear message."""

import json
import time

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Guided, GuidedKind
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from services.worker.guided.grammar import Grammar, GrammarBuilder
from services.worker.guided.guides import KINDS

QUICK_S_MAX = 5.0


@pytest.fixture(scope="module")
def grammars() -> GrammarBuilder:
    return GrammarBuilder(ByteTokenizer.token_bytes, [EOS])


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

ANY = guided(GuidedKind.GRAMMAR, 'root ::= "a." . [.] # .\n')

FITTING = [
    (SCHEMA, '{"é": 12}', '{"é": "x"}'),
    (OBJECT, '{"a": [1, {"b": null}]}', "[1]"),
    (REGEX, "a/12zz", "a/1z"),
    (guided(GuidedKind.REGEX, r"\d[\d]\W[^\w]\D\\d"), "12é é\\d", "1٣"),
    (guided(GuidedKind.REGEX, r"\w\s\S\p{Nd}"), "a\u3000x٣", "é"),
    (guided(GuidedKind.JSON_SCHEMA, r'{"type": "string", "pattern": "^\\d[\\w]$"}'), '"1a"', '"٣a"'),
    (CHOICE, 'no "\\\n', "no!"),
    (CHOICE, "né😀", "ne"),
    (GRAMMAR, "[1,[23,[]]]", "[1,,2]"),
    (ANY, "a.\n.", "a.\na"),
    (ANY, "a.é.", "ax"),
    (guided(GuidedKind.GRAMMAR, 'root ::= "a\n%llguidance {}"'), "a\n%llguidance {}", "a\n%llguidance []"),
    (ESCAPES, 'A😀é-"\\u0041', 'A😀é-"A'),
]


def token_ids(text: str) -> list[int]:
    return list(text.encode())


def allows(grammar: Grammar, token: int) -> bool:
    return bool(grammar.token_mask()[token >> 3] >> (token & 7) & 1)


def test_every_kind_of_guidance_is_supported() -> None:
    assert {one.kind for one, _, _ in FITTING} == set(KINDS) == set(GuidedKind)


@pytest.mark.parametrize(("field", "fits", "differs"), FITTING)
def test_grammar_allows_matching_text_and_nothing_else(
    grammars: GrammarBuilder, field: Guided, fits: str, differs: str
) -> None:
    state = grammars.build(field, ())
    for token in token_ids(fits):
        assert allows(state, token)
        state.accept_token(token)

    assert state.is_complete
    with pytest.raises(Failure) as raised:
        grammars.build(field, token_ids(differs))
    assert raised.value.reason is Reason.GRAMMAR_REPLAY_MISMATCH


@pytest.mark.parametrize(("field", "fits", "_"), FITTING)
def test_grammar_built_after_tokens_equals_one_that_accepted_them(
    grammars: GrammarBuilder, field: Guided, fits: str, _: str
) -> None:
    tokens = token_ids(fits)
    state = grammars.build(field, ())

    for position, token in enumerate(tokens):
        assert grammars.build(field, tokens[:position]).token_mask() == state.token_mask()
        state.accept_token(token)

    assert grammars.build(field, tokens).token_mask() == state.token_mask()


def test_end_token_is_allowed_only_when_the_grammar_is_complete(grammars: GrammarBuilder) -> None:
    state = grammars.build(guided(GuidedKind.CHOICE, "no", "no way"), token_ids("n"))
    assert not allows(state, EOS)

    state.accept_token(ord("o"))

    assert allows(state, EOS)
    assert allows(state, ord(" "))


def test_white_space_in_json_is_bounded(grammars: GrammarBuilder) -> None:
    state = grammars.build(OBJECT, token_ids("{"))
    for _ in range(20):
        state.accept_token(ord("\n"))

    assert not allows(state, ord("\n"))


@pytest.mark.parametrize(
    "endless",
    [guided(GuidedKind.GRAMMAR, 'root ::= ab "b"\nab ::= "a" "b"*'), guided(GuidedKind.GRAMMAR, 'root ::= "a" root')],
)
def test_grammar_with_one_possible_token_for_ever_is_computed_token_by_token(
    grammars: GrammarBuilder, endless: Guided
) -> None:
    start = time.process_time()

    state = grammars.build(endless, token_ids("a"))
    mask = state.token_mask()

    assert sum(byte.bit_count() for byte in mask) == 1
    assert time.process_time() - start < QUICK_S_MAX


REFUSED = {
    "an empty grammar": guided(GuidedKind.GRAMMAR, ""),
    "garbage": guided(GuidedKind.GRAMMAR, "garbage \0 ::"),
    "a grammar without a root": guided(GuidedKind.GRAMMAR, 'a ::= "a"'),
    "an unknown rule": guided(GuidedKind.GRAMMAR, "root ::= a"),
    "an unclosed class": guided(GuidedKind.GRAMMAR, "root ::= [a"),
    "a reversed range": guided(GuidedKind.GRAMMAR, "root ::= [z-a]"),
    "an invalid code point": guided(GuidedKind.GRAMMAR, r'root ::= "\UFFFFFFFF"'),
    "half a surrogate pair": guided(GuidedKind.CHOICE, "\ud800"),
    "deeply nested brackets": guided(GuidedKind.GRAMMAR, "root ::= " + "(" * 20_000),
    "a huge grammar": guided(
        GuidedKind.GRAMMAR,
        "root ::= a\n"
        + "\n".join(f"{'a' * n} ::= {'a' * (n + 1)} {'a' * (n + 1)}" for n in range(1, 40))
        + f"\n{'a' * 40} ::= [a-z]",
    ),
    "an expression with look-ahead": guided(GuidedKind.REGEX, "(?=a)b"),
    "an unclosed expression": guided(GuidedKind.REGEX, "(a"),
    "deeply nested groups": guided(GuidedKind.REGEX, "(" * 20_000),
    "invalid JSON": guided(GuidedKind.JSON_SCHEMA, "nope"),
    "a schema that is not an object": guided(GuidedKind.JSON_SCHEMA, "false"),
    "an unknown type": guided(GuidedKind.JSON_SCHEMA, '{"type": "nope"}'),
    "a schema at another address": guided(GuidedKind.JSON_SCHEMA, '{"$ref": "http://example.org/schema"}'),
    "deeply nested schemas": guided(GuidedKind.JSON_SCHEMA, '{"items":' * 5_000 + "{}" + "}" * 5_000),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED.keys())
def test_invalid_guided_field_is_refused(grammars: GrammarBuilder, refused: Guided) -> None:
    with pytest.raises(Failure) as raised:
        grammars.build(refused, ())

    assert (raised.value.reason, raised.value.param) == (Reason.INVALID_ARGUMENT, "guided")
    assert raised.value.detail.startswith(f"guided.{refused.kind} cannot be used: ")
    assert len(raised.value.detail) < 400


@pytest.mark.parametrize(
    "unfulfillable",
    [
        guided(GuidedKind.GRAMMAR, "root ::= root"),
        guided(GuidedKind.GRAMMAR, r"root ::= [^\x00-\U0010FFFF]"),
        guided(GuidedKind.JSON_SCHEMA, '{"$ref": "#"}'),
    ],
)
def test_grammar_without_any_text_is_refused_when_its_mask_is_computed(
    grammars: GrammarBuilder, unfulfillable: Guided
) -> None:
    state = grammars.build(unfulfillable, ())

    with pytest.raises(Failure) as raised:
        state.token_mask()

    assert (raised.value.reason, raised.value.param) == (Reason.INVALID_ARGUMENT, "guided")
