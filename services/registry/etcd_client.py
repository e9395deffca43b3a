"""The client of etcd: each call goes to one member, has a timeout, and is retried on the next member if it fails.

It builds on the services of etcd3aio, but not on these parts:
- its client: it takes no host names (its target is `ipv4:`) and only one TLS name for all members;
- its `watch`: it ignores compaction, and on a reconnect it resumes after the store's revision rather than after the
  last event, so events between the two are lost;
- its lease keeper: it does not report a lost lease.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import structlog
from etcd3aio._protobuf import WatchCreateRequest, WatchRequest, WatchResponse, WatchStub
from etcd3aio.auth import AuthService
from etcd3aio.errors import EtcdError, EtcdUnauthenticatedError
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService

from services.core.errors import Failure, Reason
from services.registry.config import EtcdConfig
from services.rpc.status import CHANNEL_OPTIONS

log = structlog.get_logger()

Result = TypeVar("Result")

KEEPALIVE_TIME_MS = 6_000
"""How soon a watch notices that its member hangs. etcd disconnects clients that ping more often than every 5 s."""
KEEPALIVE_TIMEOUT_MS = 2_000
_TIMES = {
    "grpc.keepalive_time_ms": KEEPALIVE_TIME_MS,
    "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_MS,
    "grpc.http2.ping_timeout_ms": KEEPALIVE_TIMEOUT_MS,
}
OPTIONS = [*{**dict(CHANNEL_OPTIONS), **_TIMES}.items()]
_STALE_TOKEN = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT)
"""Status codes of etcd for a missing token, and for a token that a restart or a change of permissions invalidated."""


class NotFound(Exception):
    """etcd has no such lease."""


class Member:
    """One endpoint of etcd, with its own channel and services."""

    def __init__(self, endpoint: str, config: EtcdConfig) -> None:
        self.endpoint = endpoint
        self._timeout_s = config.call_timeout_s
        self._channel = _channel(endpoint, config)
        self.kv = KVService(self._channel, max_attempts=1)
        self.leases = LeaseService(self._channel, max_attempts=1)
        self.auth = AuthService(self._channel, max_attempts=1)
        self._watches = WatchStub(self._channel)
        self._token = ""

    def set_token(self, token: str) -> None:
        self._token = token
        for service in (self.kv, self.leases):
            service.set_token(token)

    async def keep_alive(self, lease_id: int) -> None:
        """Renew the lease once. Raises NotFound."""
        stream = self.leases.keep_alive(lease_id)
        try:
            async with asyncio.timeout(self._timeout_s):
                response: Any = await stream.read()
        finally:
            stream.cancel()
        if response is grpc.aio.EOF:
            raise TimeoutError("the stream ended without an answer")
        if response.TTL <= 0:
            raise NotFound

    async def watch(
        self, key: bytes, range_end: bytes, revision: int, on_response: Callable[[WatchResponse], None]
    ) -> None:
        """Pass all events from `revision` on to `on_response`. Returns when etcd cancels the watch.

        etcd also cancels a watch whose revision it has compacted. No event is skipped: after the watch has ended, the
        caller must read everything again.
        """
        # With `hasleader` a member that has lost its leader cancels the watch; without, it would send nothing.
        metadata = [("hasleader", "true"), *([("token", self._token)] if self._token else [])]
        stream = self._watches.Watch(metadata=metadata)
        try:
            async with asyncio.timeout(self._timeout_s):
                create = WatchCreateRequest(key=key, range_end=range_end, start_revision=revision)
                with contextlib.suppress(asyncio.InvalidStateError):  # The call has failed: `read` raises the reason.
                    await stream.write(WatchRequest(create_request=create))
                response = await stream.read()
            while response is not grpc.aio.EOF:
                if response.canceled:
                    log.info("etcd ended the watch", why=response.cancel_reason, compacted=response.compact_revision)
                    return
                on_response(response)
                response = await stream.read()
        finally:
            stream.cancel()

    async def close(self) -> None:
        await self._channel.close()


class EtcdClient:
    """Calls the members of one etcd cluster."""

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._members = [Member(endpoint, config) for endpoint in config.endpoints]
        self._current = 0

    async def call(self, operation: Callable[[Member], Awaitable[Result]], *, members_max: int | None = None) -> Result:
        """Run `operation` on one member after another and return the first result.

        Each member is tried once, at most `members_max` of them. `operation` may therefore take effect more than once.
        Raises NotFound, Failure(STORE_AWAY).
        """
        errors: list[str] = []
        for _ in self._members[:members_max]:
            member = self._members[self._current]
            try:
                return await self._authenticated(member, operation)
            except (grpc.aio.AioRpcError, EtcdError, TimeoutError) as error:
                if _code(error) is grpc.StatusCode.NOT_FOUND:
                    raise NotFound from error
                errors.append(f"{member.endpoint}: {_text(error)}")
                self._use_next(member)
        raise Failure(Reason.STORE_AWAY, f"no etcd member completed the call ({'; '.join(errors)})")

    async def close(self) -> None:
        for member in self._members:
            await member.close()

    async def _authenticated(self, member: Member, operation: Callable[[Member], Awaitable[Result]]) -> Result:
        try:
            return await operation(member)
        except (grpc.aio.AioRpcError, EtcdError) as error:
            if not self._config.username or _code(error) not in _STALE_TOKEN:
                raise
        granted = await member.auth.authenticate(
            self._config.username, self._config.password, timeout=self._config.call_timeout_s
        )
        member.set_token(granted.token)
        return await operation(member)

    def _use_next(self, member: Member) -> None:
        """Use the next member from now on, unless another call has already moved away from `member`."""
        if self._members[self._current] is member:
            self._current = (self._current + 1) % len(self._members)


def _channel(endpoint: str, config: EtcdConfig) -> grpc.aio.Channel:
    if not config.is_tls:
        return grpc.aio.insecure_channel(endpoint, options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(config.ca, config.client_key, config.client_cert)
    return grpc.aio.secure_channel(endpoint, credentials, options=OPTIONS)


def _code(error: BaseException) -> grpc.StatusCode | None:
    if isinstance(error, EtcdUnauthenticatedError):
        return grpc.StatusCode.UNAUTHENTICATED
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


def _text(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or "no answer in time"
