r"""Guided decoding: grammars that say which tokens may continue an answer.

The automata come from llguidance, an optional dependency of 3 MB. llama.cpp has its own grammar sampler, but it aborts
the process on a grammar that it cannot parse or that allows no token, and on a token that the grammar forbids; its
wrapper offers no way to check first. llguidance refuses all of these with a message, and bounds its work.

The state of a grammar is a pure function of its text, the vocabulary and the tokens before, so a continuation has the
same state as the uncut answer. A guided grammar is written in GBNF: see `gbnf.py`.
A regular expression has the syntax of the Rust crate `regex`, without look-around and
back-references, and must match the whole answer. `\d` and `\w` are ASCII, as in
ECMAScript and for the keyword `pattern`; `\s` is any white space.

Measured with a vocabulary of 49,152 tokens: 130 ms for the vocabulary, once; 0.3 to 6 ms to compile a usual grammar;
for each token, 10 µs to accept it and 10 to 900 µs for the mask.

A hostile text takes more, whatever the limits are: `{"multipleOf": 9999991}` takes 20 s and 1 GB, and the first mask of
60,000 equal choices takes 7 s. So this module is only used where that harms nobody: see `guide_work.py`.
"""

import json
from collections.abc import Iterable, Sequence

import llguidance

from services.core.errors import Failure, Reason, quoted
from services.core.request import Guided, GuidedKind
from services.worker.guided import gbnf
from services.worker.guided.explain import explained
from services.worker.guided.refusals import unusable

_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""They stop most hostile texts early, with a message. With `max_items_in_row` at its default of 2,000, a grammar of as
many alternatives would compile, and fail at its first token. A lexer state takes 1 to 2 kB.
"""
_ERROR_CHARACTERS_MAX = 300
_HEADER = '%llguidance {"no_forcing": true}\n'
"""Without `no_forcing`, llguidance follows every byte that has no alternative: for `"a"+ "a"` this never ends."""
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
"""Bounds the white space between two values: a small model would otherwise write line breaks without end."""


class _Vocabulary:
    """The attributes that `LLTokenizer` needs from a tokeniser."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes], end_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("nothing is tokenised: `no_forcing` is set")


class GrammarBuilder:
    """Builds grammars for one vocabulary. `token_bytes`: by token id; b"" for tokens without text."""

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Iterable[int]) -> None:
        ends = sorted(end_ids)
        self._tokenizer = llguidance.LLTokenizer(
            _Vocabulary(token_bytes, ends[0]),  # type: ignore[arg-type]
            n_vocab=len(token_bytes),
            eos_token=ends,
        )

    def build(self, guided: Guided, generated: Sequence[int]) -> "Grammar":
        """Return the grammar after the `generated` tokens. Raises INVALID_ARGUMENT or GRAMMAR_REPLAY_MISMATCH."""
        matcher = llguidance.LLMatcher(self._tokenizer, _lark_of(guided), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(guided.kind, explained(matcher.get_error()))
        consumed_count = matcher.try_consume_tokens(list(generated))
        if matcher.is_error():
            raise _refusal(guided.kind, explained(matcher.get_error()))
        if consumed_count != len(generated):
            raise Failure(Reason.GRAMMAR_REPLAY_MISMATCH, f"the answer so far does not match its guided.{guided.kind}")
        return Grammar(guided.kind, matcher)


class Grammar:
    """The grammar of one guided answer, and its state after the tokens so far."""

    def __init__(self, kind: GuidedKind, matcher: llguidance.LLMatcher) -> None:
        self._kind = kind
        self._matcher = matcher

    def token_mask(self) -> bytes:
        """The tokens that may follow: bit `id % 8` of byte `id // 8`. End tokens are set if the grammar is complete.

        Raises Failure(INVALID_ARGUMENT) if computing the mask exceeds the bounds on work.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _refusal(self._kind, explained(self._matcher.get_error()))
        return mask

    def accept_token(self, token: int) -> None:
        """Advance by one token of the mask that is not an end token.

        Raises Failure(INVALID_ARGUMENT) if that exceeds the bounds on work.
        """
        if not self._matcher.consume_token(token):
            raise _refusal(self._kind, explained(self._matcher.get_error()))

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()


def _lark_of(guided: Guided) -> str:
    """The guided field in llguidance's dialect of Lark. Raises Failure(INVALID_ARGUMENT)."""
    try:
        return _HEADER + _rules_of(guided)
    except RecursionError as error:
        raise _refusal(guided.kind, "it is nested too deeply: flatten it") from error
    except Exception as error:
        # The converter raises exceptions of many classes for invalid input.
        raise _refusal(guided.kind, str(error)) from error


def _rules_of(guided: Guided) -> str:
    match guided.kind:
        case GuidedKind.JSON_OBJECT:
            return _json_rules({"type": "object"})
        case GuidedKind.JSON_SCHEMA:
            return _json_rules(_decoded(guided.texts[0]))
        case GuidedKind.REGEX:
            return f"start: /{llguidance.regex_to_lark(guided.texts[0], use_ascii='dw')}/"
        case GuidedKind.CHOICE:
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in guided.texts)
        case GuidedKind.GRAMMAR:
            return gbnf.lark_of(guided.texts[0])


def _decoded(schema: str) -> object:
    """The value of a JSON text. Raises ValueError also for text that is not JSON but that `json` reads."""
    return json.loads(schema, object_pairs_hook=_object_of, parse_constant=_no_number)


def _object_of(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has the key {quoted(key)} twice: leave one out")
        found[key] = value
    return found


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _json_rules(schema: object) -> str:
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    return "start: %json " + json.dumps(schema | {"x-guidance": _JSON_OPTIONS})


def _refusal(kind: GuidedKind, error: str) -> Failure:
    return unusable(kind, error[:_ERROR_CHARACTERS_MAX])
