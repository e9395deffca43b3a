"""Refuses a tenant's request when the tenant has used up what it may send, and charges what it is served."""

from services.core.call import Call
from services.core.errors import Failure
from services.core.interface import Delta, Finish, Layer, Sink
from services.core.request import Request
from services.frontend.limits.tenant_limits import Grant, TenantLimits

CHARACTERS_PER_TOKEN = 4
"""What a text is charged before it is tokenised. The tokeniser corrects it."""


class Limit:
    """Below accept: a draining process charges nobody. Above admit: who has used up its limits is told that, not that
    there is no room, and a request that finds no room is given back.

    Tokens are charged, not held back: what was let in is finished, and the next request waits.
    """

    def __init__(self, inner: Layer, limits: TenantLimits) -> None:
        self._inner = inner
        self._limits = limits

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if not call.tenant.is_limited:
            return await self._inner(request, call, sink)
        grant = self._admit(request, call)
        charging = _Charging(sink, call, grant)
        try:
            finish = await self._inner(request, call, charging)
        except Failure as failure:
            if failure.traits.retryable and not charging.has_begun:
                grant.give_back()
            raise
        else:
            return finish
        finally:
            if not grant.is_settled:
                grant.settle(_prompt_tokens(call))
            grant.leave()

    def _admit(self, request: Request, call: Call) -> Grant:
        """Raises RATE_LIMITED. What is left is told to the client either way."""
        try:
            if call.kept is not None and call.kept.generation.is_resumed:
                return self._limits.resume(call.tenant)
            return self._limits.admit(call.tenant, _estimated_tokens(request))
        finally:
            call.told.allowances = self._limits.allowances(call.tenant)


class _Charging:
    """Charges each token that is delivered, and the prompt once the first one comes."""

    __slots__ = ("_call", "_grant", "_sink", "has_begun")

    def __init__(self, sink: Sink, call: Call, grant: Grant) -> None:
        self._sink = sink
        self._call = call
        self._grant = grant
        self.has_begun = False

    def deliver(self, delta: Delta) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._grant.settle(_prompt_tokens(self._call))
        self._grant.use(len(delta.token_ids))
        self._sink.deliver(delta)


def _prompt_tokens(call: Call) -> int:
    """Those of all prompts; 0 if the request has not come so far, or is a resumed one, whose prompt was charged."""
    if call.kept is not None and call.kept.generation.is_resumed:
        return 0
    return sum(map(len, call.told.prompts))


def _estimated_tokens(request: Request) -> int:
    return sum(_of_prompt(part) for part in request.parts or (request,))


def _of_prompt(request: Request) -> int:
    if request.token_ids is not None:
        return len(request.token_ids)
    characters = len(request.text or "") + sum(len(turn.content) for turn in request.messages or ())
    return characters // CHARACTERS_PER_TOKEN + 1
