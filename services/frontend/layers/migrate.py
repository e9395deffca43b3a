"""Continues requests on another worker when theirs is lost or leaves.

After a loss, the request continues elsewhere after the last token delivered. A worker that announces that it leaves
keeps streaming while another one is prepared, and is cancelled only when that one delivers: make before break.
"""

import asyncio
from dataclasses import dataclass
from functools import cached_property, partial

from msgspec.structs import replace

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.interface import Finish, Layer, Sink
from services.core.request import Request
from services.frontend.migration.migration import Migration, MigrationContext
from services.frontend.migration.move import MigrationMetrics
from services.frontend.migration.policy import ResumeSampling
from services.frontend.migration.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateConfig:
    """`limit`: moves per request; 0: none.

    `seq_len_max`: tokens of prompt and answer above which the tokens are not recorded any more, so that the request
    cannot move. `resume_sampling`: see `policy_for`. `replacement_wait_s`: how long a request that lost its worker
    waits for another.
    """

    limit: int = 3
    seq_len_max: int | None = None
    resume_sampling: ResumeSampling = "prefix"
    replacement_wait_s: float = 10.0


def _ignore() -> None:
    """Called when `seq_len_max` is exceeded; never without one."""


class Migrate:
    """Above Route: each attempt chooses a worker anew.

    When a request is given up, the client gets the failure that cost its worker rather than that of the last attempt.
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

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        seq_len_max = self._config.seq_len_max
        on_exceeded = _ignore if seq_len_max is None else partial(self._metrics.count_exceeded, request.model)
        kept = call.kept
        if kept is None:
            record = Recorder(sink, request, seq_len_max, on_exceeded)
            return await Migration(request, call, record, self._context).run()
        continuations, index = kept.generation.continuations, kept.index_of(request.choice)
        record = Recorder(
            sink,
            request,
            seq_len_max,
            on_exceeded,
            records_logprobs=True,
            on_tokens=partial(kept.generation.drop_others, index),
            on_told=partial(continuations.__setitem__, index),
        )
        if base := len(request.generated_token_ids):
            call = replace(call, kept=replace(kept, base=base))
        if index in continuations:
            record.tell(continuations[index])  # It has moved before it was resumed.
        try:
            return await Migration(request, call, record, self._context).run()
        except Failure as failure:
            if failure.reason is not Reason.TAKEN_OVER:  # Its new owner needs the other choices.
                kept.generation.has_failed = True
            raise

    @cached_property
    def _context(self) -> MigrationContext:
        """Created with the first request: it needs the running loop, and asking for that is a system call."""
        config, loop = self._config, asyncio.get_running_loop()
        return MigrationContext(
            self._inner, config.limit, config.resume_sampling, config.replacement_wait_s, self._metrics, loop
        )
