"""Holds what clients of one worker alone send to what frontends send: token ids, limits and a seed, all in range.

A frontend has checked and settled all this, so nothing changes for its requests. Whoever calls `Inference.Generate` on
a worker has not, and what an engine takes for granted must not come in by that door.
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
    """Above admission: what is refused here takes no place. The card is asked for only once there is a request.

    The choices of a party are looked through once: they differ in their numbers alone, and a prompt may be long.
    """

    def __init__(self, inner: Layer, card_of: Callable[[], ModelCard], rng: random.Random) -> None:
        self._inner = inner
        self._card_of = card_of
        self._rng = rng
        self._settled: WeakKeyDictionary[ChoiceGroup, Request] = WeakKeyDictionary()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        settled = self._settle(request) if call.choice_group is None else self._settle_once(request, call.choice_group)
        return await self._inner(settled, call, sink)

    def _settle_once(self, request: Request, choice_group: ChoiceGroup) -> Request:
        if (settled := self._settled.get(choice_group)) is None:
            settled = self._settled[choice_group] = self._settle(request)
        return replace(settled, choice=request.choice)

    def _settle(self, request: Request) -> Request:
        card = self._card_of()
        if request.model != card.model:
            raise Failure(Reason.MODEL_NOT_FOUND, f"this worker serves {card.model!r}, not {quoted(request.model)}")
        if request.text is not None or request.messages is not None:
            raise invalid("prompt", "a worker takes token ids alone: give tokens, or ask a frontend")
        if request.n != 1:
            raise invalid("n", "a worker draws one answer to a request: ask a frontend, or leave n out")
        if request.stop.strings:
            raise invalid("stop", "a worker does not know the text of its tokens: ask a frontend, or give token ids")
        check_request(request)
        return settle(request, card, self._rng)
