"""The models that this frontend knows: cards and tokenisers, as the workers sent them."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc
import structlog

from services.core.errors import Failure, Reason, quoted
from services.core.model_card import ModelCard, TokenizerRef
from services.discovery.client import InstanceRecord
from services.models.tokenizers import Tokenizer, load_tokenizer
from services.rpc.status import CHANNEL_OPTIONS, failure_of
from services.stubs import worker_pb2, worker_pb2_grpc

log = structlog.get_logger()

TOKENIZER_BYTES_MAX = 256 * 1024 * 1024
FETCH_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Model:
    """What it takes to prepare a request for a model."""

    card: ModelCard
    tokenizer: Tokenizer


class ModelCatalog:
    """Models by name. A model stays known when its workers are gone: its absence is then NO_WORKERS, not a wrong name.
    Nor is one that workers are registered for, though none has told its card yet.

    All workers of one name must have the same card, or a stream could not move between them. The first card counts,
    until a worker brings another while none of the old is left. Equal cards are one object.
    """

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}
        self._tokenizers: dict[TokenizerRef, Tokenizer] = {}
        self._registered: Counter[str] = Counter()  # How many instances of discovery's view serve a name.

    def add(self, model: Model) -> None:
        """Know the model from now on."""
        self._models[model.card.model] = model

    def names(self) -> Sequence[str]:
        """All models that are known, in order."""
        return sorted(self._models)

    def find(self, name: str) -> Model:
        """Raises MODEL_NOT_FOUND for a name that no worker has ever had."""
        if name not in self._models:
            known = ", ".join(sorted(self._models)) or "none so far"
            raise Failure(Reason.MODEL_NOT_FOUND, f"there is no model {quoted(name)}; known: {known}", param="model")
        return self._models[name]

    def knows(self, name: str) -> bool:
        """Whether `find` would find it."""
        return name in self._models

    def note_registered(self, came: Iterable[InstanceRecord], gone: Iterable[InstanceRecord]) -> None:
        """Instances that discovery names, and those that it names no more."""
        self._registered.update(one.model for one in came)
        for one in gone:
            self._registered[one.model] -= 1
            if not self._registered[one.model]:
                del self._registered[one.model]

    def registered_count(self, name: str) -> int:
        """How many workers are registered for it, whether they can be reached or not."""
        return self._registered[name]

    def is_name(self, name: str) -> bool:
        """Whether workers have made the name, and not a client."""
        return name in self._models or name in self._registered

    async def learn(self, card: ModelCard, address: str, may_replace: Callable[[], bool]) -> ModelCard:
        """Know the model from now on; returns our own copy of the card.

        address: of the worker that has the tokeniser. may_replace: whether no worker with another card for the name is
        left. Raises Failure when the tokeniser can't be had or the card contradicts.
        """
        if (known := self._settled(card, may_replace)) is not None:
            return known
        tokenizer = self._tokenizers.get(card.tokenizer) or await _load(card.tokenizer, address)
        if len(tokenizer.token_bytes) < card.vocab_size:
            detail = f"its tokeniser has {len(tokenizer.token_bytes)} tokens where its card says {card.vocab_size}"
            raise Failure(Reason.PROTOCOL_VIOLATION, detail)
        if (known := self._settled(card, may_replace)) is not None:  # Others learn, too, while a tokeniser is fetched.
            return known
        self._tokenizers[card.tokenizer] = tokenizer
        self.add(Model(card, tokenizer))
        log.info("model known", model=card.model, engine=card.engine, context_length=card.context_length)
        return card

    def _settled(self, card: ModelCard, may_replace: Callable[[], bool]) -> ModelCard | None:
        """The card if it is known already. Raises if another is, and counts."""
        known = self._models.get(card.model)
        if known is None:
            return None
        if known.card == card:
            return known.card
        if not may_replace():
            detail = f"its card for {card.model!r} differs from that of the workers that serve it already"
            raise Failure(Reason.CANNOT_CONNECT, detail)
        return None


async def _load(ref: TokenizerRef, address: str) -> Tokenizer:
    """Fetch and read a tokeniser. Raises Failure."""
    content = await _fetch(ref, address) if ref.sha256 else b""
    try:
        return await asyncio.to_thread(load_tokenizer, ref, content)
    except (OSError, ValueError, RuntimeError) as error:
        raise Failure(Reason.CANNOT_CONNECT, f"the tokeniser cannot be read: {error}") from error


async def _fetch(ref: TokenizerRef, address: str) -> bytes:
    """The tokeniser's content, checked."""
    content = bytearray()
    try:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            request = worker_pb2.FetchTokenizerRequest(sha256=ref.sha256)
            call = worker_pb2_grpc.WorkerStub(channel).FetchTokenizer(request, timeout=FETCH_TIMEOUT_S)
            while isinstance(piece := await call.read(), worker_pb2.FetchTokenizerResponse):
                content += piece.data
                if len(content) > TOKENIZER_BYTES_MAX:
                    detail = f"the tokeniser is larger than {TOKENIZER_BYTES_MAX} bytes"
                    raise Failure(Reason.PROTOCOL_VIOLATION, detail)
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, otherwise=Reason.CANNOT_CONNECT) from error
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise Failure(Reason.PROTOCOL_VIOLATION, "the tokeniser does not have the checksum that the card names")
    return bytes(content)
