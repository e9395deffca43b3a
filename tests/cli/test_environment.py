"""Variables with our prefix: a misspelling of ours is an error, and what belongs to other programs is ignored."""

import pytest

from services.cli import known_variables
from services.cli.environment import Ignored, check_variables, is_service_link, misspelling_of, similar_to

KNOWN = known_variables()
SERVICE_LINKS = {
    "DYN_FRONTEND_SERVICE_HOST": "10.0.0.1",
    "DYN_FRONTEND_SERVICE_PORT": "8000",
    "DYN_FRONTEND_SERVICE_PORT_HTTP": "8000",
    "DYN_FRONTEND_SERVICE_PORT_GRPC_WEB": "50051",
    "DYN_FRONTEND_PORT": "tcp://10.0.0.1:8000",
    "DYN_FRONTEND_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "DYN_FRONTEND_PORT_8000_TCP_PROTO": "tcp",
    "DYN_FRONTEND_PORT_8000_TCP_PORT": "8000",
    "DYN_FRONTEND_PORT_8000_TCP_ADDR": "10.0.0.1",
    "DYN_FRONTEND_PORT_53_UDP": "udp://10.0.0.1:53",
    "DYN_FRONTEND_PORT_9_SCTP_ADDR": "fd00::1",
    "DYN_SERVICE_HOST": "10.0.0.1",
    "DYN_PORT": "tcp://[fd00::1]:80",
}
OF_DYNAMO = (
    *("DYN_NAMESPACE", "DYN_NAMESPACE_PREFIX", "DYN_COMPONENT", "DYN_ENDPOINT", "DYN_LOG", "DYN_LOGGING_JSONL"),
    *("DYN_SYSTEM_ENABLED", "DYN_SYSTEM_HOST", "DYN_SYSTEM_LIVE_PATH", "DYN_SYSTEM_STARTING_HEALTH_STATUS"),
    *("DYN_HTTP_HOST", "DYN_HTTP_PORT", "DYN_ROUTER_MODE", "DYN_ROUTER_TEMPERATURE", "DYN_MODEL_NAME"),
    *("DYN_MODEL_PATH", "DYN_KV_CACHE_BLOCK_SIZE", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE", "DYN_DISCOVERY_BACKEND"),
    *("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC", "DYN_NATS_REQUEST_TIMEOUT_SECS", "DYN_TCP_RPC_PORT"),
    *("DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", "DYN_GRPC_METRICS_PORT"),
    *("DYN_TRTLLM_MAX_BATCH_SIZE", "DYN_TRTLLM_TENSOR_PARALLEL_SIZE", "DYN_TRTLLM_GUIDED_DECODING_BACKEND"),
    *("DYN_DISABLE_FRONTEND_NVEXT", "DYN_MOCKER_KV_CACHE_TRACE", "DYN_DYNAMO_REQUEST_QUEUE_TIMEOUT_MS", "DYN_FILE_KV"),
    *("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", "DYN_PREPROCESS_WORKERS", "DYN_HEALTH_CHECK_REQUEST_TIMEOUT"),
)
"""Names that NVIDIA Dynamo 1.x reads, among them those that resemble ours most."""


@pytest.mark.parametrize(("name", "value"), SERVICE_LINKS.items())
def test_service_link_is_recognised(name: str, value: str) -> None:
    assert is_service_link(name, value)


@pytest.mark.parametrize(("name", "value"), [("DYN_SYSTEM_PORT", "9090"), ("DYN_MODEL", "tcp://10.0.0.1:80")])
def test_value_of_an_option_is_no_service_link(name: str, value: str) -> None:
    assert not is_service_link(name, value)


def test_service_links_are_ignored_and_removed() -> None:
    environment = {**SERVICE_LINKS, "DYN_LOG_LEVEL": "debug", "PATH": "/bin"}

    ignored = check_variables(environment, KNOWN)

    assert ignored == Ignored(sorted(SERVICE_LINKS), [], {})
    assert environment == {"DYN_LOG_LEVEL": "debug", "PATH": "/bin"}


def test_link_in_the_variable_of_an_option_is_ignored() -> None:
    """Kubernetes sets these names for services called dyn-system and dyn-up-http."""
    links = {"DYN_SYSTEM_PORT": "tcp://10.0.0.1:9090", "DYN_UP_HTTP_PORT": "tcp://10.0.0.2:8000"}
    environment = dict(links)

    ignored = check_variables(environment, KNOWN)

    assert ignored == Ignored([], sorted(links), {})
    assert environment == {}


@pytest.mark.parametrize("name", OF_DYNAMO)
def test_variable_of_dynamo_is_ignored(name: str) -> None:
    environment = {name: "1"}

    assert list(check_variables(environment, KNOWN).unknown) == [name]
    assert environment == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DYN_MIGRATION_LIMITS", "DYN_MIGRATION_LIMIT"),
        ("DYN_MIGRATON_LIMIT", "DYN_MIGRATION_LIMIT"),
        ("DYN_MIGRATIONLIMIT", "DYN_MIGRATION_LIMIT"),
        ("DYN_REGISTRYS", "DYN_REGISTRY"),
        ("DYN_REIGSTRY", "DYN_REGISTRY"),
        ("DYN_LOG_LVL", "DYN_LOG_LEVEL"),
        ("DYN_STAL_MS", "DYN_STALL_MS"),
        ("DYN_ADMIN_GRPC_LISTN", "DYN_ADMIN_GRPC_LISTEN"),
        ("DYN_SYSTM_PORT", "DYN_SYSTEM_PORT"),
        ("DYN_LEASE_SEC", "DYN_LEASE_SECS"),
        ("DYN_MODLE", "DYN_MODEL"),
    ],
)
def test_misspelling_is_an_error_that_names_the_variable_meant(name: str, meant: str) -> None:
    assert misspelling_of(name, KNOWN) == meant
    with pytest.raises(SystemExit, match=f"^error: no option reads {name}: did you mean {meant}\\?$"):
        check_variables({name: "3"}, KNOWN)


def test_ignored_variable_names_a_similar_one_of_ours() -> None:
    assert check_variables({"DYN_HTTP_PORT": "80", "DYN_FOO": "1"}, KNOWN).unknown == {
        "DYN_FOO": "",
        "DYN_HTTP_PORT": "DYN_UP_HTTP_PORT",
    }
    assert similar_to("DYN_FOO", KNOWN) == ""
