"""The models that this frontend knows: cards and tokenisers, as the workers sent them."""

import asyncio
import hashlib
from dataclasses import dataclass

import grpc
import structlog

from services.card import ModelCard, TokenizerRef
from services.errors import Failure, Reason
from services.rpc import failure_of
from services.stubs import worker_pb2, worker_pb2_grpc
from services.tokenizers import Tokenizer, load_tokenizer

log = structlog.get_logger()

TOKENIZER_BYTES_MAX = 256 * 1024 * 1024
FETCH_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Model:
    """What it takes to prepare a request for a model."""

    card: ModelCard
    tokenizer: Tokenizer


class Catalogue:
    """Models by name. A model stays known when its workers are gone: its absence is then NO_WORKERS, not a wrong name.

    All workers of one name must have the same card, or a stream could not move between them. The first card counts,
    until a worker brings another while none of the old is left: `replaces` says so.
    """

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}
        self._tokenizers: dict[TokenizerRef, Tokenizer] = {}

    def add(self, model: Model) -> None:
        """Know the model from now on."""
        self._models[model.card.model] = model

    def find(self, name: str) -> Model:
        """Raises MODEL_NOT_FOUND for a name that no worker has ever had."""
        if name not in self._models:
            known = ", ".join(sorted(self._models)) or "none so far"
            raise Failure(Reason.MODEL_NOT_FOUND, f"there is no model {name!r}; known: {known}", param="model")
        return self._models[name]

    def knows(self, name: str) -> bool:
        """Whether `find` would find it."""
        return name in self._models

    def card_of(self, name: str) -> ModelCard:
        """The card of a known model."""
        return self.find(name).card

    async def learn(self, card: ModelCard, stub: "worker_pb2_grpc.WorkerAsyncStub", *, replaces: bool) -> None:
        """Know the model from now on. Raises Failure when its tokeniser can't be had or its card contradicts."""
        known = self._models.get(card.model)
        if known is not None and known.card == card:
            return
        if known is not None and not replaces:
            detail = f"its card for {card.model!r} differs from that of the workers that serve it already"
            raise Failure(Reason.CANNOT_CONNECT, detail)
        tokenizer = self._tokenizers.get(card.tokenizer)
        if tokenizer is None:
            content = await _fetch(card.tokenizer, stub)
            tokenizer = await asyncio.to_thread(load_tokenizer, card.tokenizer, content)
            self._tokenizers[card.tokenizer] = tokenizer
        self.add(Model(card, tokenizer))
        log.info("model known", model=card.model, engine=card.engine, context_length=card.context_length)


async def _fetch(ref: TokenizerRef, stub: "worker_pb2_grpc.WorkerAsyncStub") -> bytes:
    """The tokeniser's content, checked."""
    if not ref.sha256:
        return b""
    content = bytearray()
    try:
        call = stub.FetchTokenizer(worker_pb2.FetchTokenizerRequest(sha256=ref.sha256), timeout=FETCH_TIMEOUT_S)
        while isinstance(piece := await call.read(), worker_pb2.FetchTokenizerResponse):
            content += piece.data
            if len(content) > TOKENIZER_BYTES_MAX:
                call.cancel()
                raise Failure(Reason.PROTOCOL_VIOLATION, f"the tokeniser is larger than {TOKENIZER_BYTES_MAX} bytes")
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, otherwise=Reason.CANNOT_CONNECT) from error
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise Failure(Reason.PROTOCOL_VIOLATION, "the tokeniser does not have the checksum that the card names")
    return bytes(content)
