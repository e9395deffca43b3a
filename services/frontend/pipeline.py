"""The order of a request's layers: this list is the design of the frontend."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from services.core.common_layers import Accept, Deadline, Guard
from services.core.gate import Gate
from services.core.interface import Layer
from services.frontend.layers.admit import Admit
from services.frontend.layers.choices import Choices
from services.frontend.layers.detokenize import Detokenize
from services.frontend.layers.migrate import Migrate, MigrateConfig
from services.frontend.layers.observe import Observe
from services.frontend.layers.preprocess import Preprocess
from services.frontend.layers.prompts import Prompts
from services.frontend.layers.route import Route
from services.frontend.metrics.definitions import Metrics
from services.frontend.model_catalog import ModelCatalog
from services.frontend.routing.policy import AnyWorker, Workers
from services.frontend.routing.thresholds import BusyThresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """What the layers are configured with."""

    migrate: MigrateConfig = field(default_factory=MigrateConfig)


def frontend_layers(
    config: PipelineConfig,
    *,
    catalog: ModelCatalog,
    pool: Workers[AnyWorker],
    busy: BusyThresholds,
    metrics: Metrics,
    gate: Gate,
    rng: random.Random,
) -> list[Callable[[Layer], Layer]]:
    """The layers over the transport, outermost first. For each two neighbours a test swaps them and fails."""

    admit = partial(Admit, catalog=catalog, pool=pool, busy=busy, rng=rng)
    migrate = partial(Migrate, config=config.migrate, metrics=metrics)
    return [
        partial(Observe, metrics=metrics, is_known=catalog.is_name),  # Above all: bugs and refusals are outcomes too.
        Guard,  # Above all that can have a bug.
        partial(Accept, gate=gate),  # Above admit: a process that leaves takes nothing, whether there is room or not.
        admit,  # Above the deadline: a refusal for want of room costs nothing, not even a timer.
        Deadline,  # Above every wait, that for the tokeniser included.
        partial(Preprocess, catalog=catalog, rng=rng),  # Above prompts: all are good before one is answered.
        Prompts,  # Above choices: each prompt has as many answers as were asked for.
        Choices,  # Above present: each choice has a text of its own.
        partial(Detokenize, catalog=catalog),  # Above migrate: whoever ends the answer, its text ends here.
        migrate,  # Above route: each attempt may choose anew.
        partial(Route, pool=pool, busy=busy, rng=rng),  # Above the transport: the call names its worker.
    ]
