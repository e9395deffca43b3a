"""Options of gRPC channels, and the conversion of failures to gRPC statuses and back."""

from functools import lru_cache
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.core.errors import OPENAI_CODE, REJECTIONS, TRAITS, Failure, Reason
from services.runtime.loop import clock

Detail = TypeVar("Detail", error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)

DOMAIN = "unbroken"
_INFO_TYPE, _RETRY_TYPE = (
    f"type.googleapis.com/{kind.DESCRIPTOR.full_name}"
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)
)
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""The largest message on any hop: a prompt of about four million tokens."""

DETAIL_BYTES_MAX = 1024
"""The largest detail of a failure on the wire, in UTF-8. Trailers of 8 KiB hold it twice, once percent-encoded."""
PARAM_BYTES_MAX = 128
METADATA_BYTES_MAX = 1024
"""The largest metadata of a failure on the wire, keys and values together, in UTF-8. The rest is left out."""
REQUEST_ID = "request_id"
OWN_METADATA = frozenset({"retryable", "hint", "param", REQUEST_ID, OPENAI_CODE})
"""Keys of ErrorInfo that follow from the failure. Its metadata uses other keys."""
INFOS_KEPT = 16
"""How many encoded ErrorInfos of refusals are kept. A crowd that is refused gets the same one but for the ids."""
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
RECONNECT_BACKOFF_MS_MAX = 1_000
CONNECT_TIMEOUT_MS = 2_000
"""How long one attempt to connect may take. gRPC's option for it is called `min_reconnect_backoff_ms`, but a peer that
refuses is tried again after `initial_reconnect_backoff_ms`."""
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # No connection inside the plane takes a proxy that the environment names for other programs (`http_proxy`,
    # `grpc_proxy`). The second option is for GRPC_ADDRESS_HTTP_PROXY, which the first does not cover: it is used for no
    # address. An empty proxy instead would have gRPC print an error for each connection.
    ("grpc.enable_http_proxy", 0),
    ("grpc.address_http_proxy_enabled_addresses", ""),
    ("grpc.enable_retries", 0),  # Retries belong to migration: two layers that retry multiply.
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Without it gRPC waits a minute for the answer to a ping, despite the keepalive timeout (seen with SIGSTOP).
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # A restarted peer must not inherit the back-off of another channel.
]


def status_of(failure: Failure, *, request_id: str = "") -> status_pb2.Status:
    """Convert the failure to google.rpc.Status, with ErrorInfo, and RetryInfo if a time is known.

    The detail is cut, because it may repeat what a client sent, at any length. Trailers that are too large reach the
    client as a different status without a reason.
    """
    encode = _refusal_info if failure.reason in REJECTIONS else _info
    info = encode(failure.reason, tuple(failure.shown_metadata.items()), failure.hint, failure.param)
    if request_id:  # Protobuf merges what is joined.
        info += error_details_pb2.ErrorInfo(metadata={REQUEST_ID: request_id}).SerializeToString()
    status = status_pb2.Status(code=failure.traits.grpc.value[0], message=_cut(failure.detail, DETAIL_BYTES_MAX))
    status.details.add(type_url=_INFO_TYPE, value=info)  # `Any.Pack` takes several times as long.
    if failure.retry_after_s is not None:
        seconds, milliseconds = divmod(round(failure.retry_after_s * 1e3), 1000)
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds, retry.retry_delay.nanos = seconds, milliseconds * 1_000_000
        status.details.add(type_url=_RETRY_TYPE, value=retry.SerializeToString())
    return status


def _info(reason: Reason, given: tuple[tuple[str, str], ...], hint: str | None, param: str | None) -> bytes:
    """ErrorInfo without a request id, encoded. `given`: the metadata of the failure, of which as much as fits is sent,
    beside the keys that every failure has.
    """
    metadata: dict[str, str] = {}
    bytes_left = METADATA_BYTES_MAX
    for key, value in given:
        bytes_left -= len(key.encode(errors="replace")) + len(value.encode(errors="replace"))
        if bytes_left < 0:
            break
        metadata[key] = value
    metadata["retryable"] = str(TRAITS[reason].retryable).lower()
    if hint is not None:
        metadata["hint"] = hint
    if param is not None:
        metadata["param"] = _cut(param, PARAM_BYTES_MAX)
    encoded: bytes = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata).SerializeToString()
    return encoded


_refusal_info = lru_cache(maxsize=INFOS_KEPT)(_info)
"""The same, kept. Only for refusals: their metadata are not a client's."""


def _cut(text: str, bytes_max: int) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= bytes_max else encoded[: bytes_max - 3].decode(errors="ignore") + "…"


def failure_of(error: grpc.aio.AioRpcError, *, otherwise: Reason) -> Failure:
    """The failure that an rpc ended with: that of its ErrorInfo if the status has ours, else one with `otherwise`."""
    try:
        status = rpc_status.from_call(error) or status_pb2.Status()
        info = _detail_of(status, error_details_pb2.ErrorInfo)
        retry = _detail_of(status, error_details_pb2.RetryInfo)
    except (DecodeError, ValueError):  # Details that cannot be decoded or contradict the status are ignored.
        info = None
    if info is None or info.domain != DOMAIN or info.reason not in Reason.__members__:
        return Failure(otherwise, f"{error.code().name.lower()}: {error.details()}")
    return Failure(
        Reason(info.reason),
        status.message,
        param=info.metadata.get("param"),
        retry_after_s=None if retry is None else retry.retry_delay.ToMilliseconds() / 1e3,
        metadata={key: value for key, value in info.metadata.items() if key not in OWN_METADATA},
    )


def _detail_of(status: status_pb2.Status, kind: type[Detail]) -> Detail | None:
    """The first detail of this type, or None. Raises DecodeError."""
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            return detail
    return None


def time_left_s(deadline: float | None) -> float | None:
    """Seconds until `deadline` (absolute, in event-loop time), at least 0; None without a deadline."""
    return None if deadline is None else max(0.0, deadline - clock())
