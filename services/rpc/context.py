"""What a handler sees of its rpc: that of `services/http/grpc`, whose server serves all handlers."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from services.core.errors import Failure
from services.core.tenant import Tenant


class Context(Protocol):
    """One rpc. A handler answers it by what it sends, and ends it by its return, or by the Failure that it raises.

    `has_room`: whether the client is not slow. `on_evicted`: called with the reason if the rpcs of the client's
    connection leave too much unread together, and this one most: nothing more of it is sent.
    """

    on_evicted: Callable[[str], None] | None

    @property
    def has_room(self) -> bool: ...

    @property
    def tenant(self) -> Tenant:
        """The tenant of the caller."""
        ...

    def hold(self, size: int) -> None:
        """Count what waits outside until there is room."""
        ...

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """What the client has sent."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it has none."""
        ...

    async def read(self) -> Any:
        """The next request of a stream of requests; None after the last."""
        ...

    def send_head(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """Send the initial metadata, once."""
        ...

    def send(self, message: Any) -> None:
        """Send a message without waiting: check `has_room` first, or what waits grows."""
        ...

    def sender(self, on_full: Callable[[], None]) -> Callable[[bytes], None]:
        """What sends a message that is encoded already, once the head is sent, and does not wait either.

        `on_full`: called during a send if the client becomes slow.
        """
        ...

    async def write(self, message: Any) -> None:
        """Send a message, and wait while the client is slow."""
        ...

    def progress(self) -> int:
        """A number that changes whenever the client takes something, while something waits for it."""
        ...

    def fail(self, failure: Failure, request_id: str) -> None:
        """End the rpc with the failure once the handler returns."""
        ...
