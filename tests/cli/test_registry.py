"""`unbroken registry`: options for etcd are parsed, and combinations that cannot work are refused."""

import click
import pytest
from click.testing import CliRunner

from services.cli.registry import command


def test_etcd_endpoints_may_have_a_scheme() -> None:
    option = next(parameter for parameter in command.params if parameter.name == "etcd_endpoints")
    convert = option.type.convert

    assert convert("https://a:1/, https://[::1]:2", None, None) == ["https://a:1", "https://[::1]:2"]
    for text in ("a:1,https://b:2", "ftp://a:1", "https://a"):
        with pytest.raises(click.BadParameter):
            convert(text, None, None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--etcd-endpoints", "nowhere"], "'nowhere' is not host:port"),
        (["--etcd-endpoints", "http://a:1,https://b:2"], "either all endpoints are https:// or none"),
        (["--etcd-client-cert", __file__], "--etcd-client-cert and --etcd-client-key go together"),
        (["--etcd-client-cert", __file__, "--etcd-client-key", __file__], "--etcd-client-cert needs TLS"),
        (
            ["--store", "memory", "--etcd-endpoints", "a:1"],
            "--etcd-endpoints needs --store etcd",
        ),
        (["--store", "postgres"], "'postgres' is not one of 'memory', 'etcd'"),
    ],
)
def test_contradictory_options_are_refused(options: list[str], sentence: str) -> None:
    done = CliRunner().invoke(command, ["--store=etcd", *options])

    assert done.exit_code == 2
    assert sentence in done.output
