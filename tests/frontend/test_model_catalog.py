"""ModelCatalog learns models from workers, validates their tokenisers, and refuses conflicting cards."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import QUOTED_CHARACTERS_MAX, Failure, Reason
from services.core.model_card import ModelCard, TokenizerRef
from services.discovery.client import InstanceRecord
from services.frontend import model_catalog as module
from services.frontend.model_catalog import ModelCatalog
from services.models import prompt_encoder
from services.models.hf_checkpoint import read_model_folder
from services.models.tokenizers import Tokenizer
from services.models.tokenizers.byte_level import ByteTokenizer
from services.stubs import worker_pb2, worker_pb2_grpc
from tests.http.rpcs import serving_at
from tests.support.doubles import CARD, models_of, run_async
from tests.support.model_folder import make_model_folder

CONTENT = b"a tokeniser" * 100_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Library(worker_pb2_grpc.WorkerServicer):
    """A worker that serves `content` for every checksum."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.fetches = 0

    async def FetchTokenizer(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.fetches += 1
        for start in range(0, len(self._content), 100_000):
            await context.write(worker_pb2.FetchTokenizerResponse(data=self._content[start : start + 100_000]))


def learn(catalog: ModelCatalog, card: ModelCard, content: bytes = CONTENT, *, times: int = 1) -> int:
    """Let the catalog learn the card from a worker. Returns how often it fetched the tokeniser."""

    async def scenario() -> int:
        library = Library(content)
        async with serving_at((worker_pb2_grpc.add_WorkerServicer_to_server, library)) as address:
            try:
                for _ in range(times):
                    await catalog.learn(card, address, lambda: False)
            finally:
                await catalog.close()
        return library.fetches

    return run_async(scenario())


def refusal(card: ModelCard, content: bytes = CONTENT, catalog: ModelCatalog | None = None) -> Failure:
    with pytest.raises(Failure) as caught:
        learn(catalog or ModelCatalog(), card, content)
    return caught.value


def test_builtin_tokeniser_is_not_fetched() -> None:
    catalog = ModelCatalog()

    assert learn(catalog, CARD) == 0
    assert catalog.find("m").card == CARD


def test_tokeniser_is_fetched_once_per_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []

    def load(_: TokenizerRef, content: bytes) -> Tokenizer:
        loaded.append(content)
        return ByteTokenizer()

    monkeypatch.setattr(prompt_encoder, "load_tokenizer", load)
    catalog, ref = ModelCatalog(), TokenizerRef("bytes", SHA256)

    fetches = learn(catalog, replace(CARD, tokenizer=ref), times=3)
    fetches += learn(catalog, replace(CARD, model="other", tokenizer=ref))

    assert fetches == 1
    assert loaded == [CONTENT]


def test_hugging_face_tokeniser_is_loaded_from_the_workers_data(tmp_path: Path) -> None:
    catalog, folder = ModelCatalog(), read_model_folder(make_model_folder(tmp_path))

    learn(catalog, replace(CARD, tokenizer=folder.tokenizer), folder.tokenizer_content)

    assert catalog.find("m").tokenizer.encode("é", add_special=True) == list("é".encode())


def test_tokeniser_with_a_wrong_checksum_is_refused() -> None:
    failure = refusal(replace(CARD, tokenizer=TokenizerRef("bytes", SHA256)), CONTENT[:-1])

    assert failure.reason is Reason.PROTOCOL_VIOLATION


def test_tokeniser_above_the_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENIZER_BYTES_MAX", 1000)

    failure = refusal(replace(CARD, tokenizer=TokenizerRef("bytes", SHA256)))

    assert failure.reason is Reason.PROTOCOL_VIOLATION


def test_unknown_kind_of_tokeniser_is_refused() -> None:
    failure = refusal(replace(CARD, tokenizer=TokenizerRef("from the future", SHA256)))

    assert "from the future" in failure.detail


def test_tokeniser_with_fewer_tokens_than_the_card_says_is_refused() -> None:
    """Otherwise a token without bytes would fail requests with INTERNAL."""
    failure = refusal(replace(CARD, vocab_size=CARD.vocab_size + 1))

    assert failure.reason is Reason.PROTOCOL_VIOLATION
    assert "257 tokens where its card says 258" in failure.detail


def test_conflicting_card_is_refused_until_it_may_replace_the_old_one() -> None:
    catalog = models_of()
    other = replace(CARD, context_length=7)

    assert "differs" in refusal(other, catalog=catalog).detail
    run_async(catalog.learn(other, "", lambda: True))
    assert catalog.find("m").card == other


def test_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(Failure) as caught:
        models_of().find("gpt")

    assert caught.value.reason is Reason.MODEL_NOT_FOUND
    assert "known: m" in caught.value.detail


@pytest.mark.parametrize(
    ("registered", "why"),
    [
        (None, "no registry has answered this frontend yet"),
        ([], "no worker has registered yet"),
        (["m"], "no worker of 'm' is connected (registered: 1)"),
    ],
)
def test_a_name_is_not_called_unknown_before_the_facts_are_in(registered: list[str] | None, why: str) -> None:
    """A bug: a restarted frontend answered MODEL_NOT_FOUND, which clients do not retry."""
    catalog = ModelCatalog()
    if registered is not None:
        catalog.note_registered([InstanceRecord("a", "x:1", model) for model in registered], [])

    with pytest.raises(Failure) as caught:
        catalog.find("m")

    assert (caught.value.reason, caught.value.retry_after_s) == (Reason.NO_WORKERS, 1)
    assert caught.value.detail.startswith(why)


def test_a_name_is_unknown_once_other_workers_are_registered() -> None:
    catalog = ModelCatalog()
    catalog.note_registered([InstanceRecord("a", "x:1", "m")], [])

    with pytest.raises(Failure) as caught:
        catalog.find("other")

    assert caught.value.reason is Reason.MODEL_NOT_FOUND


def test_empty_name_is_not_called_unknown() -> None:
    """Bug: a request without a model was told that there is no model of that name."""
    with pytest.raises(Failure, match="model is missing") as caught:
        ModelCatalog().find("")

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "model")


def test_long_model_name_is_truncated_in_the_error() -> None:
    with pytest.raises(Failure) as caught:
        models_of().find("gpt" * 30_000)

    assert len(caught.value.detail) < QUOTED_CHARACTERS_MAX + 100


def test_name_is_known_while_a_worker_is_registered_or_after_a_card_was_learned() -> None:
    catalog = models_of()
    a, b = (InstanceRecord(name, "x:1", "new") for name in "ab")

    catalog.note_registered([a, b], [])
    assert (catalog.registered_count("new"), catalog.is_name("new")) == (2, True)
    catalog.note_registered([], [a])
    assert catalog.registered_count("new") == 1
    catalog.note_registered([], [b])

    assert [catalog.is_name(name) for name in ("m", "new", "made up")] == [True, False, False]
    assert not catalog._registered, "names without instances are removed"


def test_one_of_two_conflicting_cards_learned_at_the_same_time_is_refused() -> None:
    ref = TokenizerRef("bytes", SHA256)
    cards = [replace(CARD, tokenizer=ref), replace(CARD, tokenizer=ref, context_length=7)]

    async def scenario() -> list[str]:
        catalog, outcomes = ModelCatalog(), []

        async def learn_one(card: ModelCard, address: str) -> None:
            try:
                await catalog.learn(card, address, lambda: False)
                outcomes.append("learnt")
            except Failure:
                outcomes.append("refused")

        library = (worker_pb2_grpc.add_WorkerServicer_to_server, Library(CONTENT))
        async with serving_at(library) as address, asyncio.TaskGroup() as group:
            for card in cards:
                group.create_task(learn_one(card, address))
        return sorted(outcomes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_encoder, "load_tokenizer", lambda *_: ByteTokenizer())
        assert run_async(scenario()) == ["learnt", "refused"]


def test_equal_cards_are_one_object() -> None:
    catalog = models_of()

    assert run_async(catalog.learn(replace(CARD), "", lambda: False)) is catalog.find("m").card


def test_unreadable_tokeniser_is_a_failure_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> Tokenizer:
        raise OSError("no space left")

    monkeypatch.setattr(prompt_encoder, "load_tokenizer", load)

    failure = refusal(replace(CARD, tokenizer=TokenizerRef("bytes", SHA256)))

    assert failure.reason is Reason.CANNOT_CONNECT
