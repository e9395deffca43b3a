"""Refusals of guided fields speak about the client's text, in sentences, without the library's own syntax."""

import json
import re

import pytest

from services.core.errors import Failure
from services.core.request import Guided, GuidedKind
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from services.worker.guided.explain import ERROR_CHARACTERS_MAX, explained, failing
from services.worker.guided.grammar import GrammarBuilder

FOREIGN = re.compile(r"llguidance|x-guidance|NoExtensionBias|coerce_one_of|non-verbose|%json|at \d+\(\d+\)|\n")
NO_ANSWER = "no answer can match it"

REFUSED = [
    (GuidedKind.REGEX, r"[^\s\S]", NO_ANSWER),
    (GuidedKind.GRAMMAR, "root ::= root", NO_ANSWER),
    (GuidedKind.JSON_SCHEMA, '{"$ref":"#"}', NO_ANSWER),
    (GuidedKind.JSON_SCHEMA, '{"enum":[]}', NO_ANSWER),
    (GuidedKind.JSON_SCHEMA, '{"type":"integer","minimum":3,"maximum":2}', "minimum (3) is greater than maximum (2)"),
    (GuidedKind.JSON_SCHEMA, '{"oneOf":[{"type":"string"},{"maxLength":3}]}', "use anyOf"),
    (GuidedKind.JSON_SCHEMA, '{"not":{}}', 'these keywords are not supported: "not"; leave them out'),
    (GuidedKind.JSON_SCHEMA, '{"type":"nope"}', "Invalid type: nope"),
    (GuidedKind.JSON_SCHEMA, '{"type":"string","format":"foo"}', "the format foo is not supported"),
    (GuidedKind.JSON_SCHEMA, '{"$ref":"http://a/b"}', "http://a/b is not part of it"),
    (GuidedKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "(?=a)"}), "look-around"),
    (GuidedKind.REGEX, "(a", "the expression is invalid: unclosed group"),
    (GuidedKind.REGEX, r"(a)\1", "backreferences are not supported"),
    (GuidedKind.REGEX, r"\b", "look-around and the boundaries"),
    (
        GuidedKind.GRAMMAR,
        "\n".join(f"{'root' if n == 1 else 'a' * n} ::= {'a' * (n + 1)} {'a' * (n + 1)}" for n in range(1, 40))
        + f"\n{'a' * 40} ::= [a-z]",
        "it is too large",
    ),
]


@pytest.mark.parametrize(("kind", "text", "why"), REFUSED)
def test_refusal_is_about_the_text_of_the_client(kind: GuidedKind, text: str, why: str) -> None:
    grammars = GrammarBuilder(ByteTokenizer.token_bytes, [EOS])

    with pytest.raises(Failure) as raised:
        grammars.build(Guided(kind, (text,)), ()).token_mask()

    assert why in raised.value.detail
    assert not FOREIGN.search(raised.value.detail)


def test_unknown_message_with_syntax_of_the_library_is_not_passed_on() -> None:
    assert explained("at 3(2): bad %llguidance header\n   1 | x") == "it cannot be compiled: simplify it"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            "[17:02:05] /project/cpp/regex_converter.cc:73: Regex parsing error at position 1: The group is open",
            "Regex parsing error at position 1: The group is open",
        ),
        ("bad schema\nStack trace:\n  0: xgrammar::Compile() at /a/b.cc:1\n", "bad schema"),
        (
            'Traceback (most recent call last):\n  File "/usr/lib/x.py", line 3, in f\n    g()\nValueError: bad schema',
            "ValueError: bad schema",
        ),
        ("panicked at src/regex/mod.rs:17:9:\nno such class", "panicked at no such class"),
        ("pattern /a/b is\n  invalid", "pattern /a/b is invalid"),
        ("x" * 99_999, "x" * ERROR_CHARACTERS_MAX),
        ("a/" * 99_999, ("a/" * ERROR_CHARACTERS_MAX)[:ERROR_CHARACTERS_MAX]),
    ],
)
def test_text_of_a_library_is_quoted_without_its_insides(said: str, text: str) -> None:
    assert failing(RuntimeError(said), "xgrammar") == f"xgrammar cannot compile it, and says: {text}"


@pytest.mark.parametrize("said", ["", 'Traceback (most recent call last):\n  File "/usr/lib/x.py", line 3, in f\n'])
def test_library_that_says_nothing_is_not_quoted(said: str) -> None:
    assert failing(RuntimeError(said)) == "its library cannot compile it"
