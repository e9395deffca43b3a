"""Validates the requests of clients that call a worker directly, without a frontend.

A frontend has already validated its requests and filled in their limits and seed, so they pass unchanged. A client that
calls `Inference.Generate` on a worker may send anything, and engines rely on valid requests.
"""

import random
from collections.abc import Callable
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from services.core.call import Call
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason, invalid, quoted
from services.core.interface import Finish, Layer, Sink
from services.core.model_card import ModelCard
from services.core.request import Request
from services.core.validation import check_request, settle


class Validate:
    """Stands above admission: an invalid request takes no place. `card_of` is called only when a request arrives.

    The choices of a group are validated once: they differ only in their numbers, and a prompt may be long.
    """

    def __init__(self, inner: Layer, card_of: Callable[[], ModelCard], rng: random.Random) -> None:
        self._inner = inner
        self._card_of = card_of
        self._rng = rng
        self._settled: WeakKeyDictionary[ChoiceGroup, Request] = WeakKeyDictionary()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if call.choice_group is not None:
            return await self._inner(self._settle_once(request, call.choice_group), call, sink)
        card = self._card_of()
        settled = self._settle(request, card)
        if card.resume.sampling:
            call.told.seed = settled.sampling.seed
        return await self._inner(settled, call, sink)

    def _settle_once(self, request: Request, choice_group: ChoiceGroup) -> Request:
        if (settled := self._settled.get(choice_group)) is None:
            settled = self._settled[choice_group] = self._settle(request, self._card_of())
        return replace(settled, choice=request.choice)

    def _settle(self, request: Request, card: ModelCard) -> Request:
        if request.model != card.model:
            raise Failure(Reason.MODEL_NOT_FOUND, f"this worker serves {card.model!r}, not {quoted(request.model)}")
        if request.text is not None or request.messages is not None:
            raise invalid("prompt", "a worker accepts only token ids: send tokens, or use a frontend")
        if request.n != 1:
            raise invalid("n", "a worker returns one answer for each request: leave n out, or use a frontend")
        if request.generated_choices:
            detail = "a worker returns one answer for each request: send generated_token_ids, or use a frontend"
            raise invalid("generated_choices", detail)
        if request.stop.strings:
            raise invalid("stop", "a worker cannot match stop strings: send stop token ids, or use a frontend")
        check_request(request)
        return settle(request, card, self._rng)
