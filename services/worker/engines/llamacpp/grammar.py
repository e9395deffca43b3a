r"""Guided decoding: which tokens an answer that is held to a form may go on with.

The automata are llguidance's, an optional dependency of 3 MB. llama.cpp has a grammar sampler of its own, but a grammar
that it cannot parse, or that allows no token, or a token that the grammar forbids, make it abort the process, and its
wrapper offers no way to ask first. llguidance refuses all of them with a message, and bounds its work.

A form is a pure function of its text, the vocabulary and the tokens before, so a continuation stands where the cut was.
A grammar is in GBNF. Its rules without recursion are read as the words of a lexer, longest first: of
`root ::= ab "b"` and `ab ::= "a" "b"*` the first takes every b, so that the answer never ends. An expression is one of
the Rust crate `regex`, over the whole answer, without look-around and references.

Seen with a vocabulary of 49,152 tokens: 130 ms for the vocabulary, once; 0.3 to 6 ms for a usual form; for each token
10 µs to take it and 10 to 900 µs for the mask. These run outside of Python's global lock.

Raises ImportError where llguidance is not installed; who imports this says what that means there.
"""

import json
import re
from collections.abc import Iterable, Sequence

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.core.errors import Failure, Reason, invalid
from services.core.request import Guided, GuidedKind

KINDS: tuple[GuidedKind, ...] = tuple(GuidedKind)
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""The first four are the defaults, and cost at most some 20 ms each; a lexer's state takes 1 to 2 kB."""
_ERROR_CHARACTERS_MAX = 300
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")
_ASCII_COUNT = 0x80
_HEADER = '%llguidance {"no_forcing": true}\n'
"""Without it, where the form leaves one byte only, the next such bytes are looked for, without end in `"a"+ "a"`."""
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
"""A small model between two values would write line breaks for ever."""


class _Vocabulary:
    """What `LLTokenizer` asks of a tokeniser."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes], end_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("nothing is tokenised: `no_forcing` is set")


class Forms:
    """Makes forms for one vocabulary. token_bytes: by token id; b"" for those that are no text."""

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Iterable[int]) -> None:
        ends = sorted(end_ids)
        self._tokenizer = llguidance.LLTokenizer(
            _Vocabulary(token_bytes, ends[0]),  # type: ignore[arg-type]
            n_vocab=len(token_bytes),
            eos_token=ends,
        )

    def start(self, guided: Guided, generated: Sequence[int]) -> "Form":
        """The form after the tokens that exist. Raises Failure: INVALID_ARGUMENT, GRAMMAR_REPLAY_MISMATCH."""
        matcher = llguidance.LLMatcher(self._tokenizer, _lark_of(guided), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(guided.kind, matcher.get_error())
        if matcher.try_consume_tokens(list(generated)) != len(generated):
            raise Failure(
                Reason.GRAMMAR_REPLAY_MISMATCH, f"the answer so far does not fit the guided {guided.kind} it began with"
            )
        return Form(guided.kind, matcher)


class Form:
    """Where one answer stands in its form."""

    def __init__(self, kind: GuidedKind, matcher: llguidance.LLMatcher) -> None:
        self._kind = kind
        self._matcher = matcher

    def allowed(self) -> bytes:
        """Which tokens may follow: bit `id % 8` of byte `id // 8`. An end token may if the form is complete.

        Raises Failure(INVALID_ARGUMENT) if that takes more work than the bounds allow.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _refusal(self._kind, self._matcher.get_error())
        return mask

    def take(self, token: int) -> None:
        """Go on by an allowed token that does not end the answer."""
        taken = self._matcher.consume_token(token)
        assert taken, "only what is allowed is taken"

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()


def _lark_of(guided: Guided) -> str:
    """The form in llguidance's dialect of Lark. Raises Failure(INVALID_ARGUMENT)."""
    try:
        return _HEADER + _rules_of(guided)
    except Exception as error:
        # The converter raises bare exceptions of many kinds at what it cannot read.
        raise _refusal(guided.kind, str(error)) from error


def _rules_of(guided: Guided) -> str:
    match guided.kind:
        case GuidedKind.JSON_OBJECT:
            return _json_rules({"type": "object"})
        case GuidedKind.JSON_SCHEMA:
            return _json_rules(json.loads(guided.texts[0]))
        case GuidedKind.REGEX:
            return f"start: /{llguidance.regex_to_lark(guided.texts[0], use_ascii='')}/"
        case GuidedKind.CHOICE:
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in guided.texts)
        case GuidedKind.GRAMMAR:
            return gbnf_to_lark(_ESCAPED.sub(_spell, guided.texts[0])).removeprefix("%llguidance {}")


def _spell(escaped: re.Match[str]) -> str:
    """Write a character for its number, because the converter cuts the zeros off that a number begins with."""
    number = escaped[1] or escaped[2]
    if number is None:
        return escaped[0]
    code = int(number, 16)
    return f"\\x{code:02x}" if code < _ASCII_COUNT else chr(code)


def _json_rules(schema: object) -> str:
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    return "start: %json " + json.dumps(schema | {"x-guidance": _JSON_OPTIONS})


def _refusal(kind: GuidedKind, error: str) -> Failure:
    return invalid("guided", f"guided.{kind} cannot be used: {error[:_ERROR_CHARACTERS_MAX]}")
