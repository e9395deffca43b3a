"""The admin API, which HTTP and gRPC share: authorization, and busy thresholds to read and set."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.access.bearer import bearer_of
from services.core.errors import Failure, Reason, quoted
from services.frontend.control import FrontendControl
from services.frontend.model_catalog import ModelCatalog
from services.frontend.routing.thresholds import BusyThresholds, Thresholds

log = structlog.get_logger()

NO_TOKEN_HINT = "Start the frontend with --admin-token-file, or with --admin-listen, which is an address for operators."
NOT_FOR_PAGES = "Call from a program that is no page: browsers add the header `origin`, and no token allows that."


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """The addresses that serve admin calls, and the token that callers need.

    `listen`, `grpc_listen`: addresses for admin calls alone, both over HTTP and gRPC. If neither is set, the clients'
    addresses serve admin calls: an operator who moves the admin API out of the clients' reach moves all of it.

    `token`: the token that each call must carry; None: calls need none, see `Admin`. `is_on`: whether there is an
    admin API at all.
    """

    listen: str | None = None
    grpc_listen: str | None = None
    token: str | None = field(default=None, repr=False)
    is_on: bool = True

    @property
    def is_with_clients(self) -> bool:
        """Whether the clients' addresses serve admin calls."""
        return self.is_on and self.listen is None and self.grpc_listen is None


class Admin:
    """The calls of operators. Servers call `authorize` first."""

    def __init__(
        self,
        config: AdminConfig,
        catalog: ModelCatalog,
        thresholds: BusyThresholds,
        control: FrontendControl,
        *,
        clients_need_keys: bool = False,
    ) -> None:
        """`thresholds`: of this process; all processes of a frontend have the same. `control`: sets them in all.

        `clients_need_keys`: without a token, the clients' addresses then refuse all admin calls. Otherwise everybody
        would be an operator there, also without a key.
        """
        self.is_refusing = clients_need_keys and config.token is None and config.is_with_clients
        self._token = None if config.token is None else config.token.encode()
        self._catalog = catalog
        self._thresholds = thresholds
        self._control = control

    def authorize(self, authorization: str | None, origin: str | None = None) -> None:
        """Check the headers or metadata `authorization` and `origin` of a call. Raises Failure(UNAUTHENTICATED).

        Calls of pages in a browser are refused: browsers let pages send any POST.
        """
        if origin is not None:
            detail = f"admin calls are not for pages in a browser, and this one comes from {quoted(origin)}"
            raise Failure(Reason.UNAUTHENTICATED, detail, hint=NOT_FOR_PAGES)
        if self.is_refusing:
            detail = "this frontend has no admin token, and takes no admin calls where clients need keys"
            raise Failure(Reason.UNAUTHENTICATED, detail, hint=NO_TOKEN_HINT)
        if self._token is None:
            return
        given = (bearer_of(authorization) or "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._token):
            given_token = "no token" if authorization is None else "another token"
            raise Failure(
                Reason.UNAUTHENTICATED, f"admin calls need this frontend's token: this call has {given_token}"
            )

    @property
    def is_acting(self) -> bool:
        """Whether requests are refused for busy thresholds."""
        return self._thresholds.is_on

    def thresholds(self) -> Sequence[tuple[str, Thresholds]]:
        """The thresholds of each model that a worker has ever served here, by the model's name."""
        return [(model, self._thresholds.of(model)) for model in self._catalog.names()]

    def thresholds_of(self, model: str) -> Thresholds:
        """The thresholds of one model. Raises Failure(MODEL_NOT_FOUND)."""
        self._catalog.find(model)
        return self._thresholds.of(model)

    async def set_thresholds(self, model: str, changes: Mapping[str, Any]) -> Thresholds:
        """Change thresholds of a model. `changes`: by the names that clients know; None disables a threshold.

        Returns all thresholds of the model after the change. Raises Failure with MODEL_NOT_FOUND, INVALID_ARGUMENT, or
        what FrontendControl.set_thresholds raises.
        """
        thresholds = self.thresholds_of(model)
        if changes:
            thresholds.changed(changes)  # Refuses values out of range before any process has them.
            await self._control.set_thresholds(model, changes)
            thresholds = self._thresholds.of(model)
            log.info("busy thresholds set", model=model, thresholds=thresholds, is_acting=self.is_acting)
        return thresholds
