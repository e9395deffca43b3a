"""Addresses of the form host:port are split and validated."""

import pytest

from services.runtime.address import is_local, is_wildcard, split_address, split_addresses


def test_list_of_addresses_is_split_at_commas() -> None:
    assert split_addresses(" a:1, [::1]:2 ,") == ["a:1", "[::1]:2"]


@pytest.mark.parametrize("text", ["", " , ", "a", "a:", "a:1,b", "8001", ":8001", "a:65536", "::1:80", "http://a:1"])
def test_text_that_is_not_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_addresses(text)


def test_address_is_split_into_host_and_port() -> None:
    assert [split_address(text) for text in ("a.b-c:65535", "[::1]:0")] == [("a.b-c", 65535), ("[::1]", 0)]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("[::]", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("notlocalhost", False),
        ("", False),
    ],
)
def test_hosts_that_only_mean_the_machine_itself_are_recognized(host: str, expected: bool) -> None:
    assert is_local(host) is expected


def test_wildcard_hosts_are_recognized() -> None:
    hosts = ("0.0.0.0", "[::]", "127.0.0.1", "[::1]", "worker-1")

    assert [is_wildcard(host) for host in hosts] == [True, True, False, False, False]
