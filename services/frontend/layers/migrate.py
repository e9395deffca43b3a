"""A lost worker costs the client nothing but time: the request goes on elsewhere after the last token delivered.

A worker that is lost has its requests continued on another. A worker that says that it leaves goes on streaming while
another is made ready, and is cut off only when that one delivers: make before break.
"""

import asyncio
from dataclasses import dataclass
from functools import cached_property, partial

from services.core.call import Call
from services.core.interface import Finish, Layer, Sink
from services.core.model_card import ModelCard
from services.core.request import Request
from services.frontend.migration.migration import Migration, MigrationContext
from services.frontend.migration.move import MigrationMetrics
from services.frontend.migration.policy import allowed_by
from services.frontend.migration.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateConfig:
    """limit: moves per request, 0 for none. seq_len_max: prompt and generated tokens above which a request is not
    tracked, and so not moved, any more. replacement_wait_s: how long a request that lost its worker waits for another.
    """

    limit: int = 3
    seq_len_max: int | None = None
    replacement_wait_s: float = 10.0


def _never() -> None:
    """Without a bound nothing exceeds it."""


class Migrate:
    """Above route: each attempt may choose anew.

    What the client gets when it gives up is the failure that cost it its worker, not what became of the last try.
    """

    def __init__(
        self,
        inner: Layer,
        config: MigrateConfig,
        metrics: MigrationMetrics,
    ) -> None:
        self._inner = inner
        self._config = config
        self._metrics = metrics
        self._told: dict[str, ModelCard] = {}  # By model; below preprocess there are no others than those of workers.

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        assert call.card is not None, "preprocess names the card"
        if self._told.get(request.model) is not call.card:
            self._tell_limit(call.card)
        seq_len_max = self._config.seq_len_max
        on_exceeded = _never if seq_len_max is None else partial(self._metrics.count_exceeded, request.model)
        record = Recorder(sink, request, seq_len_max, on_exceeded)
        return await Migration(request, call, record, self._context).run()

    @cached_property
    def _context(self) -> MigrationContext:
        """Created with the first request: it needs the running loop, and asking for that is a system call."""
        config, loop = self._config, asyncio.get_running_loop()
        return MigrationContext(self._inner, config.limit, config.replacement_wait_s, self._metrics, loop)

    def _tell_limit(self, card: ModelCard) -> None:
        self._told[card.model] = card
        self._metrics.set_limit(card.model, allowed_by(card, self._config.limit))
