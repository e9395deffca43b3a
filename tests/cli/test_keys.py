"""`unbroken keys`: a key is printed once; lists and errors have nothing of it but its id."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from services.access.keys_watch import WatchedKeys
from services.cli.keys import command


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def new_key(path: Path, *options: str) -> str:
    done = run("new", f"--keys-file={path}", "--tenant=acme", *options)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def test_new_key_is_printed_and_valid(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"

    text = new_key(path)

    assert WatchedKeys(path).tenant_of({"authorization": f"Bearer {text}"}).name == "acme"


def test_list_shows_ids_and_tenants_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = [new_key(path), new_key(path, "--expires=2001-02-03"), new_key(path, "--expires=2999-02-03")]

    done = run("list", f"--keys-file={path}")

    first, second, third = [text.split("_")[1] for text in keys]
    assert done.stdout.splitlines() == [
        f"{first}  acme",
        f"{second}  acme  expired 2001-02-03",
        f"{third}  acme  expires 2999-02-03",
    ]


def test_revoked_key_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key_id = new_key(path).split("_")[1]

    assert run("revoke", f"--keys-file={path}", key_id).stdout == f"revoked {key_id}\n"

    assert run("list", f"--keys-file={path}").stdout == ""
    assert "has no key" in run("revoke", f"--keys-file={path}", key_id).output


@pytest.mark.parametrize("words", [("new", "--tenant=A B"), ("list",), ("revoke", "00000000")])
def test_what_is_wrong_is_told_in_a_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(words[0], f"--keys-file={tmp_path / 'keys.toml'}", *words[1:])

    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert "Traceback" not in done.output


def test_file_can_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KEYS_FILE", str(tmp_path / "keys.toml"))

    assert run("new", "--tenant=acme").exit_code == 0
    assert (tmp_path / "keys.toml").exists()
