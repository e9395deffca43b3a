"""The layers that a request passes through, in order. This list is the design of the frontend."""

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
from services.frontend.layers.keep import Keep
from services.frontend.layers.migrate import Migrate, MigrateConfig
from services.frontend.layers.observe import Observe
from services.frontend.layers.preprocess import Preprocess
from services.frontend.layers.prompts import Prompts
from services.frontend.layers.route import Route
from services.frontend.limits.limit import Limit
from services.frontend.limits.tenant_limits import TenantLimits
from services.frontend.metrics.definitions import Metrics
from services.frontend.model_catalog import ModelCatalog
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.policy import Workers
from services.frontend.routing.thresholds import BusyThresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Configuration of the layers. `parses_contents`: control tokens that messages spell are recognised."""

    migrate: MigrateConfig = field(default_factory=MigrateConfig)
    parses_contents: bool = False


def frontend_layers(
    config: PipelineConfig,
    *,
    catalog: ModelCatalog,
    pool: Workers,
    busy: BusyThresholds,
    metrics: Metrics,
    gate: Gate,
    rng: random.Random,
    limits: TenantLimits | None = None,
) -> list[Callable[[Layer], Layer]]:
    """The layers above the transport, outermost first. For each pair of neighbours a test fails if they are swapped.

    `limits`: those of tenants; None: nobody has any.
    """
    balancer = Balancer(busy, rng, catalog.registered_count)
    admit = partial(Admit, catalog=catalog, pool=pool, balancer=balancer)
    preprocess = partial(Preprocess, catalog=catalog, rng=rng, parses_contents=config.parses_contents)
    migrate = partial(Migrate, config=config.migrate, metrics=metrics)
    limit = [] if limits is None else [partial(Limit, limits=limits)]
    return [
        partial(Observe, metrics=metrics, is_known=catalog.is_name),  # Above all: refusals and bugs are outcomes, too.
        Guard,  # Above every layer that can have a bug.
        partial(Accept, gate=gate),  # Above admit: a draining process refuses requests even if workers have room.
        *limit,  # Above admit: a request that finds no room is given back to its tenant.
        admit,  # Above the deadline: a refusal for lack of capacity must not cost even a timer.
        Deadline,  # Above every wait, including the wait for the tokeniser.
        preprocess,  # Above keep: what is kept has token ids and a seed.
        Keep,  # Above prompts: all prompts are valid before one is answered, and an answer is kept as a whole.
        Prompts,  # Above choices: each prompt gets the requested number of answers.
        Choices,  # Above detokenize: each choice has its own text.
        partial(Detokenize, catalog=catalog),  # Above migrate: text that one worker began may end on another.
        migrate,  # Above route: each attempt may choose another worker.
        partial(Route, pool=pool, balancer=balancer),  # Above the transport, which sends on the chosen session.
    ]
