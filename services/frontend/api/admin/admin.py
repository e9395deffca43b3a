"""What operators may read and set while a frontend runs, and who is one; alike over HTTP and gRPC."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.core.errors import Failure, Reason
from services.frontend.control import FrontendControl
from services.frontend.model_catalog import ModelCatalog
from services.frontend.routing.thresholds import BusyThresholds, Thresholds

log = structlog.get_logger()

SCHEME = "bearer"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """listen: where HTTP admin calls are answered, grpc_listen: those over gRPC. With neither, both are answered where
    those of clients are; with either, no admin call is answered there, so that what was put out of clients' reach can't
    be had over the other protocol.

    token: what each call must bring; None: nothing. is_on: False where there is to be no admin API at all.
    """

    listen: str | None = None
    grpc_listen: str | None = None
    token: str | None = field(default=None, repr=False)
    is_on: bool = True

    @property
    def is_with_clients(self) -> bool:
        """Whether admin calls are answered where those of clients are."""
        return self.is_on and self.listen is None and self.grpc_listen is None


class Admin:
    """The calls of operators. Each is for `authorize` first."""

    def __init__(
        self, config: AdminConfig, catalog: ModelCatalog, thresholds: BusyThresholds, whole: FrontendControl
    ) -> None:
        """thresholds: of this process, which are those of all. whole: sets them everywhere."""
        self._token = None if config.token is None else config.token.encode()
        self._catalog = catalog
        self._thresholds = thresholds
        self._whole = whole

    def authorize(self, authorization: str | None) -> None:
        """authorization: what the header or metadata of that name says. Raises UNAUTHENTICATED."""
        if self._token is None:
            return
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip().encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._token) or scheme.lower() != SCHEME:
            brought = "none" if authorization is None else "another"
            raise Failure(
                Reason.UNAUTHENTICATED, f"admin calls need this frontend's token, and this call brings {brought}"
            )

    @property
    def is_acting(self) -> bool:
        """Whether thresholds act."""
        return self._thresholds.is_on

    def thresholds(self) -> Sequence[tuple[str, Thresholds]]:
        """Those of all models that some worker has ever served here, by name."""
        return [(model, self._thresholds.of(model)) for model in self._catalog.names()]

    def thresholds_of(self, model: str) -> Thresholds:
        """Those of one. Raises MODEL_NOT_FOUND."""
        self._catalog.find(model)
        return self._thresholds.of(model)

    async def set_thresholds(self, model: str, changes: Mapping[str, Any]) -> Thresholds:
        """Change some of a model's thresholds, by the names that clients have for them; None: not looked at any more.

        Returns all of the model's, as they now are. Raises MODEL_NOT_FOUND, INVALID_ARGUMENT, and what
        Whole.set_thresholds does.
        """
        thresholds = self.thresholds_of(model)
        if changes:
            thresholds.changed(changes)  # What is out of range is refused before anybody has it.
            await self._whole.set_thresholds(model, changes)
            thresholds = self._thresholds.of(model)
            log.info("busy thresholds set", model=model, thresholds=thresholds, is_acting=self.is_acting)
        return thresholds
