"""Lets a helper process compile a guided field before an engine does that in a process that all its requests share.

A field that crashes the helper, or exceeds its bounds, is refused and never reaches the engine. Fields that were good
are remembered, so that the usual schema is tried once.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from services.core.errors import Failure, Reason
from services.core.request import GuidedKind
from services.isolation.bounds import Bounds
from services.isolation.helper_process import HelperBug
from services.isolation.losses import HelperLost, Loss
from services.isolation.pool import HelperPool
from services.worker.guided.refusals import of_pool, unusable

log = structlog.get_logger()

LOADER = "services.worker.guided.trial_work:load"
TRIAL_CPU_S_MAX = 1.0
"""Processor time of a trial: the engine may make no token for as long, for anybody."""
TRIAL_BYTES_MAX = 512 << 20
LOAD_BYTES_MAX = 32 << 30
"""Address space to load a library: xgrammar imports torch, which maps several GiB."""
LOAD_S_MAX = 120.0
TRIALS_MAX = 64
"""Trials that run or wait."""
GOOD_KEPT = 4096
"""Fields that were good, by their hashes of 32 bytes."""


class Trials:
    """Tries guided fields. Use it on one event loop. `tokenizer`: see `HuggingFaceTokenizer`."""

    def __init__(
        self,
        backend: str,
        tokenizer: bytes,
        vocab_size: int,
        end_ids: tuple[int, ...],
        on_lost: Callable[[Loss], object] = lambda _: None,
    ) -> None:
        """on_lost: called with each helper that is lost."""
        content = json.dumps((backend, vocab_size, end_ids)).encode() + b"\n" + tokenizer
        bounds = Bounds(
            jobs_max=TRIALS_MAX,
            job_cpu_s_max=TRIAL_CPU_S_MAX,
            job_bytes_max=TRIAL_BYTES_MAX,
            load_s_max=LOAD_S_MAX,
            load_cpu_s_max=LOAD_S_MAX,
            load_bytes_max=LOAD_BYTES_MAX,
        )
        self._pool = HelperPool("trials of guided requests", LOADER, content, bounds=bounds, on_lost=on_lost)
        self._good: dict[bytes, None] = {}  # The oldest comes first.

    async def load(self) -> None:
        """Start the process that forks the helpers, before the first of them is needed."""
        try:
            await self._pool.load()
        except Failure as failure:
            log.error("guided requests are refused: the process that tries them cannot start", why=failure.detail)

    async def close(self) -> None:
        await self._pool.close()

    async def check(self, kind: GuidedKind, given: Mapping[str, Any]) -> None:
        """Raise INVALID_ARGUMENT if the engine cannot bear this field, or WORKER_AT_CAPACITY if nobody can tell now.

        `kind`: as the client knows the field. `given`: as the engine does.

        Raises INTERNAL for a bug in the trial, which is logged.
        """
        job = json.dumps((kind, given)).encode()
        key = hashlib.sha256(job).digest()
        if key in self._good:
            return
        try:
            await self._pool.run(job)
        except HelperLost as lost:
            raise unusable(kind, f"{_blame(lost)}; simplify it") from None
        except HelperBug as bug:
            log.error("trying a guided form failed", exc_info=bug)
            raise Failure(Reason.INTERNAL, "the worker could not try the guided form") from None
        except Failure as failure:
            raise of_pool(failure) from None
        self._good[key] = None
        if len(self._good) > GOOD_KEPT:
            del self._good[next(iter(self._good))]


def _blame(lost: HelperLost) -> str:
    if lost.loss is Loss.CPU:
        return f"compiling it takes more than {TRIAL_CPU_S_MAX:g} s of processor time"
    return f"compiling it in a process of its own failed, which {lost.how}"
