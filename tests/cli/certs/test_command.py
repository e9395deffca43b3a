"""`unbroken certs`: makes what the other commands take, keeps its CA, and shows no key."""

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from services.cli import frontend
from services.cli.certs import command
from services.cli.certs.options import PEER_VARIABLES, edge_pair, peer_files
from services.tls.certificate import PairFiles, certificate_of, server_context
from services.tls.roles import Role

GIVEN = {"tls_cert": None, "tls_key": None}


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def test_folder_has_a_ca_a_certificate_for_clients_and_one_for_each_role(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "certs"

    done = run(str(folder), "--host=llm.example", "--domain=plane.example")

    assert done.exit_code == 0, done.output
    assert {file.name for file in folder.iterdir()} == {
        f"{name}.{kind}" for name in ("ca", "edge", *Role) for kind in ("pem", "key")
    }
    assert f"{folder}/edge.pem  for localhost, 127.0.0.1, ::1, llm.example" in done.stdout
    for role in Role:
        files = PairFiles(folder / f"{role}.pem", folder / f"{role}.key")
        assert certificate_of(server_context(files), files).uris == (f"spiffe://plane.example/{role}",)


def test_second_run_keeps_the_ca_and_makes_new_certificates(tmp_path: Path) -> None:
    run(str(tmp_path))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    done = run(str(tmp_path))

    assert "the CA that was there" in done.stdout
    same = {file.name for file in tmp_path.iterdir() if file.read_bytes() == before[file.name]}
    assert same == {"ca.pem", "ca.key"}


def test_no_key_is_shown(tmp_path: Path) -> None:
    done = run(str(tmp_path))

    for file in tmp_path.glob("*.key"):
        assert file.read_text().splitlines()[1][:20] not in done.output


def test_host_that_is_no_name_is_an_error(tmp_path: Path) -> None:
    done = run(str(tmp_path), "--host=größer")

    assert done.exit_code == 1
    assert "neither the name of a host nor an address" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "domain", ["exämple", "", "Plane.Example", "a b", "plane.example/x", "-a", "a..b", f"{'a' * 64}.b"]
)
def test_domain_that_no_certificate_can_have_is_an_error(tmp_path: Path, domain: str) -> None:
    done = run(str(tmp_path), f"--domain={domain}")

    assert done.exit_code == 2, done.exception
    assert "is not a domain: write it in lower case, such as plane.example" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    done = run(str(tmp_path / "file" / "certs"))

    assert done.exit_code == 1
    assert "cannot be made: Not a directory" in done.stderr


def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "services.tls.issue", None)

    done = run(str(tmp_path))

    assert done.exit_code == 1
    assert "pip install 'unbroken[certs]'" in done.stderr


@pytest.mark.parametrize("name", ["tls_cert", "tls_key"])
def test_certificate_and_key_go_together(name: str) -> None:
    with pytest.raises(click.UsageError, match="--tls-cert and --tls-key go together"):
        edge_pair({**GIVEN, name: Path("x.pem")})


@pytest.mark.parametrize("variable", ["DYN_TLS_CERT_PATH", "DYN_TLS_KEY_PATH"])
def test_empty_variable_does_not_switch_tls_off(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "")

    with pytest.raises(click.UsageError, match=f"{variable} is empty"):
        edge_pair(GIVEN)


def test_frontend_takes_the_files_from_options() -> None:
    with frontend.command.make_context("frontend", ["--tls-cert=a.pem", "--tls-key=a.key"]) as context:
        config = frontend.frontend_config(context.params)

    assert config.tls == PairFiles(Path("a.pem"), Path("a.key"))


@pytest.mark.parametrize("count", [1, 2])
def test_certificate_key_and_ca_of_a_process_go_together(count: int) -> None:
    given = {name: Path("x.pem") if index < count else None for index, name in enumerate(PEER_VARIABLES)}

    with pytest.raises(click.UsageError, match="--peer-cert, --peer-key and --peer-ca go together"):
        peer_files(given)


@pytest.mark.parametrize("variable", PEER_VARIABLES.values())
def test_empty_variable_does_not_switch_tls_between_processes_off(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "")

    with pytest.raises(click.UsageError, match=f"{variable} is empty"):
        peer_files(dict.fromkeys(PEER_VARIABLES))
