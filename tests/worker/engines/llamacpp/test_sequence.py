"""A sequence: its counts follow its tokens, and its limits and end tokens count the whole answer."""

import pytest

from services.core.errors import Failure, Reason
from services.core.request import FinishReason, Guided, GuidedKind, Request, Stop
from services.models.tokenizers.byte_level import EOS, VOCAB_SIZE, ByteTokenizer
from services.worker.engines.llamacpp.sequence import KV_BLOCK_TOKENS, LlamaSequence, blocks_of
from tests.worker.guided.support import PlainGuide

CONTEXT_LENGTH = 100
PROMPT = (10, 11, 12)
STOP_TOKEN = 7


def sequence(
    generated: tuple[int, ...] = (), guided: Guided | None = None, **stop: int | bool | tuple[int, ...]
) -> LlamaSequence:
    fields = {"max_tokens": 8, "token_ids": (STOP_TOKEN,)} | stop
    request = Request(
        model="m",
        token_ids=PROMPT,
        generated_token_ids=generated,
        guided=guided,
        stop=Stop(**fields),  # type: ignore[arg-type]
    )
    guide = None if guided is None else PlainGuide(ByteTokenizer.token_bytes, [EOS], guided, generated)
    return LlamaSequence(1, request, frozenset({EOS}), guide)


def test_tokens_of_the_request_are_prefill_until_they_are_computed() -> None:
    started = sequence(generated=(20, 21))
    assert (started.pending_count, started.prefill_left) == (5, 5)

    started.computed_count = 5
    started.append(22, CONTEXT_LENGTH)

    assert (started.pending_count, started.prefill_left) == (1, 0)
    assert started.generated == [20, 21, 22]


def test_blocks_count_tokens_that_are_not_computed_yet() -> None:
    assert sequence().block_count == 1
    assert [blocks_of(count) for count in (KV_BLOCK_TOKENS, KV_BLOCK_TOKENS + 1)] == [1, 2]


def test_appended_token_is_the_output() -> None:
    output = sequence().append(20, CONTEXT_LENGTH)

    assert (output.token_ids, output.finish) == ((20,), None)


def test_max_tokens_counts_the_tokens_before_a_cut() -> None:
    output = sequence(generated=(20, 21), max_tokens=3).append(22, CONTEXT_LENGTH)

    assert (output.token_ids, output.finish) == ((22,), FinishReason.LENGTH)


def test_full_context_is_a_limit() -> None:
    assert sequence().is_at_limit(len(PROMPT))
    assert sequence().append(20, len(PROMPT) + 1).finish is FinishReason.LENGTH


@pytest.mark.parametrize("token", [EOS, STOP_TOKEN])
def test_end_token_ends_the_answer_and_is_not_part_of_it(token: int) -> None:
    ended = sequence()

    output = ended.append(token, CONTEXT_LENGTH)

    assert (output.token_ids, output.finish) == ((), FinishReason.STOP)
    assert ended.generated == []


def test_end_token_before_min_tokens_is_an_ordinary_token() -> None:
    assert sequence(min_tokens=1).append(STOP_TOKEN, CONTEXT_LENGTH).token_ids == (STOP_TOKEN,)


YES = Guided(GuidedKind.CHOICE, ("yes",))


def test_any_token_may_follow_without_a_grammar() -> None:
    assert sequence().token_mask() is None


def test_grammar_limits_the_next_token_and_accepts_what_is_appended() -> None:
    guided = sequence(guided=YES)
    assert _tokens(guided.token_mask()) == [ord("y")]

    guided.append(ord("y"), CONTEXT_LENGTH)

    assert _tokens(guided.token_mask()) == [ord("e")]


def test_complete_grammar_ends_the_answer_and_an_incomplete_one_fails_it() -> None:
    complete = sequence(guided=YES, generated=tuple(b"yes"))
    assert complete.end_of_grammar().finish is FinishReason.STOP

    failure = sequence(guided=YES).end_of_grammar().failure

    assert isinstance(failure, Failure)
    assert failure.reason is Reason.INVALID_ARGUMENT


def _tokens(mask: bytes | None) -> list[int]:
    assert mask is not None
    return [token for token in range(VOCAB_SIZE) if mask[token >> 3] >> (token & 7) & 1]
