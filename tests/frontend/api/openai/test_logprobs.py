"""Log probabilities have OpenAI's two formats, with exact bytes and offsets however the tokens are split."""

import codecs
import math
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason
from services.frontend.api.openai.logprobs import LOGPROB_MIN, ChatLogprobsWriter, CompletionLogprobsWriter
from services.frontend.api.openai.schemas import ChatLogprobs, CompletionLogprobs
from services.frontend.layers.detokenize import Detokenizer
from services.models.tokenizers import Vocabulary
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from tests.support.doubles import Collected, make_request

BYTES = ByteTokenizer()
A, B, SNOW = ord("a"), ord("b"), "☃".encode()


class Odd:
    """A vocabulary in which tokens have the same text: two of text, a special one, one without a name, one of text."""

    token_bytes = (b"a", b"a", b"", b"", b"<s>")
    special_tokens: Mapping[int, str] = {2: "<s>"}


def chat(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    written = ChatLogprobsWriter(BYTES).write(token_ids, logprobs, "")
    assert written is not None
    return written


def completion(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
    """The log probabilities of a whole answer."""
    text = b"".join(BYTES.token_bytes[token] for token in token_ids).decode(errors="replace")
    written = CompletionLogprobsWriter(BYTES).write(token_ids, logprobs, text, is_last=True)
    assert written is not None
    return written


def offsets_of(vocabulary: Vocabulary, parts: Sequence[tuple[Sequence[int], str]]) -> list[int]:
    """The offsets of an answer that comes in parts: tokens, and the text that is shown with them."""
    writer = CompletionLogprobsWriter(vocabulary)
    written = [writer.write(tokens, [TokenLogprobs(-1.0)] * len(tokens), text) for tokens, text in parts]
    written.append(writer.write((), (), "", is_last=True))
    return [offset for one in written if one is not None for offset in one.text_offset]


def test_chat_has_an_entry_for_each_token_with_its_top_logprobs() -> None:
    logprobs = [TokenLogprobs(-0.5, ((A, -0.5), (B, -2.0))), TokenLogprobs(-1.0)]

    written = msgspec.to_builtins(chat([A, B], logprobs))

    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    b = {"token": "b", "logprob": -2.0, "bytes": [98]}
    assert written == {
        "content": [a | {"top_logprobs": [a, b]}, b | {"logprob": -1.0, "top_logprobs": []}],
        "refusal": None,
    }


def test_chat_token_that_is_part_of_a_character_has_a_replacement_text_and_exact_bytes() -> None:
    written = chat(list(SNOW), [TokenLogprobs(-1.0)] * 3)

    assert [entry.token for entry in written.content] == ["\ufffd"] * 3
    assert b"".join(bytes(entry.bytes or ()) for entry in written.content) == SNOW


def test_chat_special_token_has_its_spelling_and_no_bytes() -> None:
    """A bug: its text was empty. The bytes of all tokens, joined, are the text, to which it adds none."""
    written = chat([EOS], [TokenLogprobs(-1.0, ((EOS, -1.0),))])

    assert (written.content[0].token, written.content[0].bytes) == ("<|end|>", None)
    assert (written.content[0].top_logprobs[0].token, written.content[0].top_logprobs[0].bytes) == ("<|end|>", None)


def test_token_without_a_spelling_is_named_by_its_id() -> None:
    written = ChatLogprobsWriter(Odd()).write([3], [TokenLogprobs(-1.0)], "")

    assert written is not None
    assert (written.content[0].token, written.content[0].bytes) == ("token_id:3", None)


def test_completion_has_four_lists() -> None:
    logprobs = [TokenLogprobs(-0.5, ((A, -0.5), (B, -2.0)))] * 2

    written = msgspec.to_builtins(completion([A, B], logprobs))

    assert written == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -2.0}] * 2,
        "text_offset": [0, 1],
    }


def test_completion_lists_the_token_itself_among_its_top_logprobs() -> None:
    logprobs = [TokenLogprobs(-3.0, ((B, -0.1),)), TokenLogprobs(-3.0)]

    written = completion([A, A], logprobs)

    assert written.top_logprobs == [{"b": -0.1, "a": -3.0}, {"a": -3.0}]
    assert list(written.top_logprobs[0]) == ["b", "a"]


@pytest.mark.parametrize(
    ("token", "top", "expected"),
    [
        (0, (), {"a": -9.0}),
        (0, ((1, -0.2), (0, -9.0)), {"token_id:1": -0.2, "a": -9.0}),
        (1, ((1, -9.0), (0, -9.5)), {"a": -9.0, "token_id:0": -9.5}),
        (1, ((0, -0.2),), {"token_id:0": -0.2, "a": -9.0}),
        (2, ((0, -0.2), (1, -0.3)), {"a": -0.2, "token_id:1": -0.3, "<s>": -9.0}),
        (2, ((4, -0.2), (2, -9.0), (3, -9.1)), {"token_id:4": -0.2, "<s>": -9.0, "token_id:3": -9.1}),
    ],
)
def test_completion_has_all_of_several_tokens_with_the_same_text(
    token: int, top: tuple[tuple[int, float], ...], expected: dict[str, float]
) -> None:
    """A bug: they shared one key, so special tokens and parts of characters hid each other."""
    written = CompletionLogprobsWriter(Odd()).write([token], [TokenLogprobs(-9.0, top)], "")

    assert written is not None
    assert list(written.top_logprobs[0].items()) == list(expected.items())
    assert written.tokens[0] in written.top_logprobs[0]


@pytest.mark.parametrize("cut", range(9))
def test_completion_offsets_count_whole_characters_wherever_the_answer_is_split(cut: int) -> None:
    tokens = [*"a☃é".encode(), 0xFF, B]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    parts = [(part, decoder.decode(bytes(part))) for part in (tokens[:cut], tokens[cut:])]

    assert offsets_of(BYTES, parts) == [0, 1, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([0xE2, A], [0, 1]),
        ([0xE2, 0x98, A], [0, 0, 1]),
        ([0xE2, 0xE2, A], [0, 1, 2]),
        ([0xE2, 0xFF, A], [0, 1, 2]),
        ([0xE0, 0x80, A], [0, 1, 2]),
        (["\ufffd".encode()[0], "\ufffd".encode()[1], "\ufffd".encode()[2], A], [0, 0, 0, 1]),
        ([SNOW[0], EOS, *SNOW[1:], A], [0, 0, 0, 0, 1]),
        ([A, EOS, B], [0, 1, 1]),
        ([A, 0xE2], [0, 1]),
    ],
)
def test_completion_offset_is_where_the_text_of_the_token_begins(tokens: list[int], expected: list[int]) -> None:
    """A bug: a token after a broken character had the place of that character, which is shown as U+FFFD."""
    text = b"".join(BYTES.token_bytes[token] for token in tokens).decode(errors="replace")

    assert offsets_of(BYTES, [(tokens, text)]) == expected


@pytest.mark.parametrize("is_cut", [False, True])
def test_completion_token_in_text_that_is_held_back_waits_for_it(is_cut: bool) -> None:
    """A bug: the tokens of a stop string had offsets beyond the end of the text."""
    writer = CompletionLogprobsWriter(BYTES)
    parts: list[tuple[bytes, str]] = [(b"so", "so"), (b" s", ""), (b"to", ""), (b"p" if is_cut else b"!", " sto!")]
    if is_cut:
        parts[-1] = (b"p", "")

    written = [writer.write(list(raw), [TokenLogprobs(-1.0)] * len(raw), text) for raw, text in parts]
    written.append(writer.write((), (), "", is_last=True))

    offsets = [one and one.text_offset for one in written]
    assert offsets == ([[0, 1], [2], None, None, [2, 2, 2, 2]] if is_cut else [[0, 1], [2], None, [3, 4, 5, 6], None])
    assert offsets_of(BYTES, [(b"".join(raw for raw, _ in parts), "".join(text for _, text in parts))]) == [
        offset for one in offsets for offset in one or ()
    ]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e9])
def test_infinite_and_undefined_log_probabilities_become_the_least_number(logprob: float) -> None:
    one = chat([A], [TokenLogprobs(logprob, ((B, logprob),))])
    other = completion([A], [TokenLogprobs(logprob)])

    assert one.content[0].logprob == one.content[0].top_logprobs[0].logprob == LOGPROB_MIN
    assert other.token_logprobs == [LOGPROB_MIN]
    assert b"null" not in msgspec.json.encode(other)


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.sampled_from([A, B, *SNOW, EOS, 0xFF]), max_size=4), max_size=6),
    st.lists(st.sampled_from(["ab", "b☃", "<|end|>", "a<|end|>b", "aab"]), max_size=2),
)
def test_completion_offsets_are_the_same_streamed_and_whole_and_never_beyond_the_text(
    deltas: list[list[int]], stops: list[str]
) -> None:
    collected, position = Collected(), 0
    detokenizer = Detokenizer(collected, BYTES, stops)
    for tokens in deltas:
        detokenizer.deliver(Delta(position, tokens, logprobs=[TokenLogprobs(-1.0)] * len(tokens)))
        position += len(tokens)
    detokenizer.finish(make_request(), FinishReason.LENGTH)

    streamed = offsets_of(BYTES, [(delta.token_ids, delta.text) for delta in collected.deltas])

    assert streamed == offsets_of(BYTES, [(collected.token_ids, collected.text)])
    assert streamed == sorted(streamed)
    assert all(offset <= len(collected.text) for offset in streamed)
    for token, offset in zip(collected.token_ids, streamed, strict=True):
        is_cut = offset == len(collected.text)
        assert is_cut or token not in (A, B) or collected.text[offset] == chr(token)


@pytest.mark.parametrize("writer_type", [ChatLogprobsWriter, CompletionLogprobsWriter])
@given(st.lists(st.tuples(st.sampled_from([b"so", b"st", b"!", SNOW[:1], SNOW[1:]]), st.booleans())), st.data())
def test_what_follows_skipped_parts_is_what_follows_written_ones(
    writer_type: type[ChatLogprobsWriter | CompletionLogprobsWriter],
    parts: list[tuple[bytes, bool]],
    data: st.DataObject,
) -> None:
    skipped_count = data.draw(st.integers(0, len(parts)))
    written, skipping = writer_type(BYTES), writer_type(BYTES)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    waiting = ""
    for number, (raw, is_shown) in enumerate(parts):
        waiting += decoder.decode(raw)
        text, waiting = (waiting, "") if is_shown else ("", waiting)
        part = (list(raw), [TokenLogprobs(-number)] * len(raw), text)
        expected = written.write(*part)
        if number < skipped_count:
            skipping.skip(*part)
        else:
            assert skipping.write(*part) == expected

    assert skipping.write((), (), waiting, is_last=True) == written.write((), (), waiting, is_last=True)
