"""PromptEncoder: a prompt becomes the same ids inside and in a helper; one that crashes its helper is refused alone."""

import base64
import json
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.core.model_card import TokenizerRef
from services.core.request import Message
from services.isolation.losses import Loss
from services.models import prompt_encoder
from services.models.hf_checkpoint import pack
from services.models.prompt import prompt_token_ids
from services.models.prompt_encoder import PromptEncoder
from services.models.template_inside import MESSAGES_INSIDE_MAX
from services.models.tokenizers.byte_level import ByteTokenizer
from services.models.tokenizers.inside import CHARACTERS_INSIDE_MAX
from tests.models.gguf_files import content_split_by
from tests.support.doubles import CARD, run_async
from tests.support.model_folder import bytes_tokenizer

TEKKEN = TokenizerRef("gguf", "x")
HUGGING_FACE = TokenizerRef("huggingface", "x")
BYTES = TokenizerRef("bytes")


@asynccontextmanager
async def encoder_with(
    ref: TokenizerRef = BYTES, content: bytes = b""
) -> AsyncIterator[tuple[PromptEncoder, list[Loss]]]:
    losses: list[Loss] = []
    encoder = await PromptEncoder.load(ref, content, losses.append)
    try:
        yield encoder, losses
    finally:
        await encoder.close()


async def failure_of(work: Awaitable[object]) -> Failure:
    with pytest.raises(Failure) as caught:
        await work
    return caught.value


def refused(ref: TokenizerRef, content: bytes) -> Failure:
    return run_async(failure_of(PromptEncoder.load(ref, content)))


def content_with(**parts: Any) -> bytes:
    return pack(json.dumps(bytes_tokenizer() | parts).encode(), special_tokens=[], vocab_size=0)


@pytest.mark.model
@pytest.mark.parametrize("unit", ["A", " ", "\n", "!", "漢"])
def test_prompt_that_crashes_its_helper_is_refused_and_the_next_is_right(unit: str) -> None:
    """A bug: the frontend ended by SIGSEGV, and with it all its streams."""

    async def scenario() -> None:
        async with encoder_with(TEKKEN, content_split_by("tekken")) as (encoder, losses):
            for prompt, param in ((unit * 24_062, "prompt"), ((Message("user", unit * 24_062),), "messages")):
                failure = await failure_of(encoder.token_ids(CARD, prompt, 24_062))
                assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, param)
                assert "SIGSEGV" in failure.detail
            assert losses == [Loss.CRASH, Loss.CRASH]
            text = f"{unit} word" * 2_000
            assert await encoder.token_ids(CARD, text, len(text)) == prompt_token_ids(CARD, encoder.tokenizer, text)

    run_async(scenario())


def random_texts(rng: random.Random, count: int) -> list[str]:
    """Texts of words, scripts, blanks, control tokens, and any characters."""
    parts = [
        "word",
        "A" * 300,
        " " * 50,
        "\n\n",
        "漢字",
        "한국어",
        "e\u0301",
        "👩‍👩‍👧",
        "12345",
        "don't",
        "<|im_start|>",
        "\ud800",
        "\0",
    ]
    return [
        "".join(rng.choice([*parts, chr(rng.randrange(0x110000))]) for _ in range(rng.randrange(1, 12)))
        for _ in range(count)
    ]


@pytest.mark.model
def test_helper_gives_the_ids_that_the_process_itself_would_give() -> None:
    long = CHARACTERS_INSIDE_MAX + 1  # The prompts of the request are too long to be encoded inside.

    async def scenario() -> None:
        async with encoder_with(TEKKEN, content_split_by("tekken")) as (encoder, _):
            for text in random_texts(random.Random(1), 300):
                for prompt in (text, (Message("user", text),)):
                    here = prompt_token_ids(CARD, encoder.tokenizer, prompt)
                    assert await encoder.token_ids(CARD, prompt, long) == here

    run_async(scenario())


LARGE = "{{ messages[0].content * 100000000 }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages[0].content[:1] }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("count", [1, MESSAGES_INSIDE_MAX * 4])
@pytest.mark.parametrize(
    ("template", "loss", "how"),
    [(LARGE, Loss.MEMORY, "MiB"), (ENDLESS, Loss.CPU, "SIGPROF")],
)
def test_template_that_needs_too_much_is_stopped(
    template: str, loss: Loss, how: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug: with a short chat it ran in the frontend, which stood still or was killed for want of memory."""
    from services.isolation import pool
    from services.isolation.bounds import Bounds

    monkeypatch.setattr(pool, "DEFAULTS", Bounds(job_cpu_s_max=3.0, job_bytes_max=64 << 20))
    card = replace(CARD, chat_template=template)
    chat = (Message("user", "x" * 200),) * count

    async def scenario() -> None:
        async with encoder_with() as (encoder, losses):
            failure = await failure_of(encoder.token_ids(card, chat, 200 * len(chat)))
            assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, "messages")
            assert losses == [loss]
            assert how in failure.detail
            assert await encoder.token_ids(CARD, "x" * 40_000, 40_000) == (120,) * 40_000

    run_async(scenario())


def test_chat_whose_rendered_text_is_too_long_is_tokenised_in_a_helper() -> None:
    inside: list[str] = []

    class Noting(ByteTokenizer):
        inside_characters_max = 100

        def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
            inside.append(text)
            return super().encode(text, add_special=add_special)

    async def scenario() -> None:
        async with encoder_with() as (encoder, _):
            noting = PromptEncoder(Noting(), encoder._pool)
            ids = await noting.token_ids(CARD, (Message("user", "x" * 99),), 99)
            assert bytes(ids) == b"<user>" + b"x" * 99

    run_async(scenario())
    assert inside == []


def test_lone_surrogates_reach_a_helper_as_they_are() -> None:
    async def scenario() -> None:
        async with encoder_with() as (encoder, _):
            assert await encoder.token_ids(CARD, "\ud800" * 40_000, 40_000) == (ord("?"),) * 40_000

    run_async(scenario())


def test_valid_tokeniser_loads() -> None:
    async def scenario() -> None:
        async with encoder_with(HUGGING_FACE, content_with()) as (encoder, _):
            assert await encoder.token_ids(CARD, "é", 1) == tuple("é".encode())

    run_async(scenario())


def test_damaged_tokeniser_is_refused_with_the_reason() -> None:
    assert "cannot be read: Cannot instantiate Tokenizer" in refused(HUGGING_FACE, b"{}\n{}").detail


def test_tokeniser_that_aborts_its_process_does_not_abort_this_one() -> None:
    """Its first four bytes announce eight gigabytes of data."""
    charsmap = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff\xff\xff\xffabcd").decode()}

    detail = refused(HUGGING_FACE, content_with(normalizer=charsmap)).detail

    assert "the model's tokeniser crashes the process that loads it, which was killed by SIGABRT: memory" in detail


def test_tokeniser_that_fails_on_ordinary_text_is_refused() -> None:
    regex = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}

    assert "does not accept the text" in refused(HUGGING_FACE, content_with(pre_tokenizer=regex)).detail


@pytest.mark.model
@pytest.mark.parametrize("size", [8, 100, 10_000, 1_000_000])
def test_truncated_gguf_vocabulary_is_refused(size: int) -> None:
    assert refused(TEKKEN, content_split_by("tekken")[:size]).reason is Reason.INTERNAL


def test_content_is_not_loaded_inside_if_it_does_not_load_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(prompt_encoder, "load_tokenizer", lambda *given: loaded.append(given))

    refused(HUGGING_FACE, b"{}\n{}")

    assert loaded == []
