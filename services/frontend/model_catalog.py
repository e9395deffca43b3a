"""The models that this frontend knows: model cards and tokenisers, as received from the workers."""

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc
import structlog

from services.core.errors import Failure, Reason, invalid, quoted
from services.core.model_card import ModelCard, TokenizerRef
from services.core.tenant import EVERYBODY, Tenant
from services.discovery.client import InstanceRecord
from services.frontend.routing.rejection import no_workers, of_registered
from services.isolation.losses import Loss
from services.models.prompt_encoder import PromptEncoder
from services.models.tokenizers import Tokenizer
from services.rpc.secure.channels import open_channel
from services.rpc.status import failure_of
from services.stubs import worker_pb2, worker_pb2_grpc
from services.tls.peers import Peers
from services.tls.roles import Role

log = structlog.get_logger()

TOKENIZER_BYTES_MAX = 256 * 1024 * 1024
FETCH_TIMEOUT_S = 30.0
NO_VIEW = "no registry has answered this frontend yet, so it does not know which models there are"


@dataclass(frozen=True, slots=True)
class Model:
    """The model card and what encodes prompts, which are needed to prepare a request."""

    card: ModelCard
    encoder: PromptEncoder

    @property
    def tokenizer(self) -> Tokenizer:
        return self.encoder.tokenizer


class ModelCatalog:
    """Models by name.

    A model stays known after its workers have left. Whether a name belongs to no model is certain only if all facts are
    in; until then, requests for it fail with NO_WORKERS, which clients retry:

    | this frontend has | an unknown name fails with |
    | --- | --- |
    | anything, but the name is empty | INVALID_ARGUMENT |
    | no answer from a registry yet | NO_WORKERS |
    | an answer, but has seen no worker registered yet | NO_WORKERS |
    | registered workers of that name, whose card it has not received yet | NO_WORKERS |
    | anything else | MODEL_NOT_FOUND |

    All workers of one model must have the same card, because streams move between them; their limits of moves are no
    part of it. The first card is used until a worker brings a different one while no worker with the old card is left.
    Equal cards are stored as one object.

    Tokenisers are kept, with the processes that share them, until `close`.
    """

    def __init__(self, on_lost: Callable[[Loss], object] = lambda _: None, peers: Peers | None = None) -> None:
        """on_lost: called with each helper process that is lost. peers: how to reach workers over TLS."""
        self._on_lost = on_lost
        self._peers = peers
        self._models: dict[str, Model] = {}
        self._encoders: dict[TokenizerRef, PromptEncoder] = {}
        self._loading: defaultdict[TokenizerRef, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._registered: Counter[str] = Counter()  # Number of registered instances by model name.
        self._has_view = False

    def add(self, model: Model) -> None:
        """Add the model, or replace the one of the same name."""
        self._models[model.card.model] = model

    def names(self) -> Sequence[str]:
        """The names of all known models, sorted."""
        return sorted(self._models)

    def find(self, name: str, tenant: Tenant = EVERYBODY) -> Model:
        """The model of that name. Raises MODEL_NOT_FOUND or NO_WORKERS; see the table above.

        A model that the tenant may not use is one that does not exist.
        """
        if name and not tenant.may_use(name):
            raise self._not_found(name, tenant)
        if (model := self._models.get(name)) is None:
            raise self._missing(name, tenant)
        return model

    def _missing(self, name: str, tenant: Tenant) -> Failure:
        if not name:
            return invalid("model", "model is missing: name one of those in /v1/models")
        if count := self._registered[name]:
            return no_workers(f"no worker of {quoted(name)} is connected {of_registered(count)}")
        if not (self._models or self._registered):
            return no_workers("no worker has registered yet, so no model is known" if self._has_view else NO_VIEW)
        return self._not_found(name, tenant)

    def _not_found(self, name: str, tenant: Tenant) -> Failure:
        known = ", ".join(sorted(filter(tenant.may_use, self._models))) or "none so far"
        return Failure(Reason.MODEL_NOT_FOUND, f"there is no model {quoted(name)}; known: {known}", param="model")

    @property
    def has_view(self) -> bool:
        """Whether a registry has ever answered."""
        return self._has_view

    def note_registered(self, came: Iterable[InstanceRecord], gone: Iterable[InstanceRecord]) -> None:
        """A registry has answered: count instances that are registered (`came`) and no longer registered (`gone`)."""
        self._has_view = True
        self._registered.update(one.model for one in came)
        for one in gone:
            self._registered[one.model] -= 1
            if not self._registered[one.model]:
                del self._registered[one.model]

    def registered_count(self, name: str) -> int:
        """The number of workers registered for the model, reachable or not."""
        return self._registered[name]

    def is_name(self, name: str) -> bool:
        """Whether the name comes from a worker; a client may send any name."""
        return name in self._models or name in self._registered

    async def learn(self, card: ModelCard, address: str, may_replace: Callable[[], bool]) -> ModelCard:
        """Add the model and return the catalog's copy of its card.

        address: of a worker that has the tokeniser.
        may_replace: returns whether no worker with a different card for the same model is left.
        Raises Failure if the tokeniser cannot be loaded, or if the card differs from one that is in use.
        """
        if (known := self._settled(card, may_replace)) is not None:
            return known
        encoder = await self._encoder_of(card.tokenizer, address)
        if (count := len(encoder.tokenizer.token_bytes)) < card.vocab_size:
            detail = f"its tokeniser has {count} tokens where its card says {card.vocab_size}"
            raise Failure(Reason.PROTOCOL_VIOLATION, detail)
        if (known := self._settled(card, may_replace)) is not None:  # Another task may have added it meanwhile.
            return known
        self.add(Model(card, encoder))
        log.info("model known", model=card.model, engine=card.engine, context_length=card.context_length)
        return card

    async def _encoder_of(self, ref: TokenizerRef, address: str) -> PromptEncoder:
        """Fetch and load a tokeniser, once for all tasks that need it. Raises Failure."""
        async with self._loading[ref]:
            if ref not in self._encoders:
                content = await _fetch(ref, address, self._peers) if ref.sha256 else b""
                try:
                    self._encoders[ref] = await PromptEncoder.load(ref, content, self._on_lost)
                except (OSError, ValueError, RuntimeError) as error:
                    raise Failure(Reason.CANNOT_CONNECT, f"the tokeniser cannot be read: {error}") from error
            return self._encoders[ref]

    async def close(self) -> None:
        """End the processes that tokenise."""
        for encoder in {*self._encoders.values(), *(model.encoder for model in self._models.values())}:
            await encoder.close()

    def _settled(self, card: ModelCard, may_replace: Callable[[], bool]) -> ModelCard | None:
        """Return the known card if it equals `card`, or None if `card` is to be added. Raises Failure on a conflict."""
        known = self._models.get(card.model)
        if known is None:
            return None
        if known.card == card:
            return known.card
        if not may_replace():
            detail = f"its card for {card.model!r} differs from that of the workers that serve it already"
            raise Failure(Reason.CANNOT_CONNECT, detail)
        return None


async def _fetch(ref: TokenizerRef, address: str, peers: Peers | None) -> bytes:
    """Fetch the tokeniser's file and verify its checksum. Raises Failure."""
    content = bytearray()
    try:
        async with open_channel(address, peers, Role.WORKER) as channel:
            request = worker_pb2.FetchTokenizerRequest(sha256=ref.sha256)
            call = worker_pb2_grpc.WorkerStub(channel).FetchTokenizer(request, timeout=FETCH_TIMEOUT_S)
            while isinstance(chunk := await call.read(), worker_pb2.FetchTokenizerResponse):
                content += chunk.data
                if len(content) > TOKENIZER_BYTES_MAX:
                    detail = f"the tokeniser is larger than {TOKENIZER_BYTES_MAX} bytes"
                    raise Failure(Reason.PROTOCOL_VIOLATION, detail)
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, otherwise=Reason.CANNOT_CONNECT) from error
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise Failure(Reason.PROTOCOL_VIOLATION, "the tokeniser does not have the checksum that the card names")
    return bytes(content)
