"""Rejects a request that no worker has room for, before any work is done on it."""

from services.core.call import Call
from services.core.errors import Failure
from services.core.interface import Finish, Layer, Sink
from services.core.request import Request
from services.core.tenant import Tenant
from services.frontend.model_catalog import Model, ModelCatalog
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.policy import Workers


class Admit:
    """Above the deadline and preprocess: a rejection costs neither a timer nor a tokeniser.

    `Route` asks the same balancer again, because other requests may have taken the room while a prompt was tokenised.
    """

    def __init__(self, inner: Layer, catalog: ModelCatalog, pool: Workers, balancer: Balancer) -> None:
        self._inner = inner
        self._catalog = catalog
        self._pool = pool
        self._balancer = balancer

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        model = self._find(request.model, call.tenant)
        if call.kept is None or not call.kept.generation.is_resumed:  # A resumed answer has its room.
            self._require_room(model, request, call)
        return await self._inner(request, call, sink)

    def _find(self, name: str, tenant: Tenant) -> Model:
        """Raises MODEL_NOT_FOUND, or NO_WORKERS with its own `Retry-After`, as for other rejections."""
        try:
            return self._catalog.find(name, tenant)
        except Failure as failure:
            raise self._balancer.rejections.jittered(failure) from None

    def _require_room(self, model: Model, request: Request, call: Call) -> None:
        """Raises OVERLOADED, NO_WORKERS, or INVALID_ARGUMENT for more choices than any worker takes."""
        worker_set = self._pool.worker_set(model.card)
        count = max([part.together_count for part in request.parts or (request,)])
        self._balancer.require_room(worker_set, self._balancer.needs(request.model, call, count))
