"""The order of a request's layers: this list is the design of the frontend."""

import random
from dataclasses import dataclass, field
from functools import partial

from services.frontend.catalogue import Catalogue
from services.frontend.metrics import Metrics
from services.frontend.migrate import Migrate, MigrateConfig
from services.frontend.observe import Observe
from services.frontend.pool import Pool
from services.frontend.preprocess import Preprocess
from services.frontend.present import Present
from services.frontend.route import Route
from services.layers import Accept, Deadline, Gate, Guard, stack
from services.request import Layer, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """What the layers are configured with."""

    migrate: MigrateConfig = field(default_factory=MigrateConfig)


def build_pipeline(
    transport: Layer,
    config: PipelineConfig,
    *,
    catalogue: Catalogue,
    pool: Pool,
    metrics: Metrics,
    gate: Gate,
    rng: random.Random,
) -> Layer:
    """The frontend's layers over `transport`, outermost first. Each line's reason has a test that swaps it."""

    def count_move(request: Request, has_tokens: bool) -> None:
        kind = "ongoing_request" if has_tokens else "new_request"
        metrics.migrations.labels(request.model, kind).inc()

    return stack(
        partial(Observe, metrics=metrics, is_known=catalogue.knows),  # Above all: a refusal is an outcome too.
        Guard,  # Below observe, above all that can have a bug: a bug is counted as what the client sees.
        partial(Accept, gate=gate),  # Above everything that takes time or a slot: who leaves takes nothing new.
        Deadline,  # Above every wait.
        partial(Preprocess, catalogue=catalogue, rng=rng),  # Above migrate: a continuation needs token ids.
        partial(Present, catalogue=catalogue),  # Above migrate: half a character outlives its worker.
        partial(Migrate, config=config.migrate, resume_of=catalogue.resume_of, on_move=count_move),
        # Above route: each attempt may choose anew.
        partial(Route, pool=pool, rng=rng),  # Above the transport: the call names its worker.
        innermost=transport,
    )
