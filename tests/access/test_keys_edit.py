"""Keys are added to the file and taken out again; what else is in it stays as it was written."""

import fcntl
import os
import stat
import subprocess
import sys
import threading
from datetime import date
from pathlib import Path

import pytest

from services.access import keys_edit
from services.access.keys_edit import add_key, revoke_key
from services.access.keys_file import KeysFileError, keys_in
from services.access.keys_watch import WatchedKeys

BEFORE = """# Ours.
[tenants.acme]
weight = 3.0  # They pay.
"""
BY_HAND = f"""[tenants.acme]
[[ keys ]]
"id" = "00000001"
"tenant" = "acme"
"sha256" = "{"0" * 64}"
"created" = 2026-11-29
"""


def keys_of(path: Path) -> dict[str, str]:
    return {key.id: key.tenant.name for key in keys_in(path.read_text(), path)}


def test_first_key_creates_the_file_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"

    key = add_key(path, "acme")

    assert keys_of(path) == {key.id: "acme"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert WatchedKeys(path).tenant_of({"x-api-key": key.text}).name == "acme"


def test_file_has_no_key_but_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"

    key = add_key(path, "acme")

    assert key.text not in path.read_text()
    assert key.text.split("_")[2] not in path.read_text()


def test_what_was_written_by_hand_stays(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(BEFORE)
    path.chmod(0o640)

    key = add_key(path, "acme", expires=date(2027, 1, 1))
    assert path.read_text().startswith(BEFORE)
    assert keys_in(path.read_text(), path)[0].tenant.weight == 3.0
    assert keys_in(path.read_text(), path)[0].expires == date(2027, 1, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640

    revoke_key(path, key.id)
    assert path.read_text().rstrip("\n") == BEFORE.rstrip("\n")


def test_only_the_key_that_is_meant_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    first, second, third = [add_key(path, name) for name in ("a", "b", "a")]

    assert revoke_key(path, second.id) == second.id

    assert keys_of(path) == {first.id: "a", third.id: "a"}


def test_comment_on_the_next_key_stays(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    first = add_key(path, "a")
    path.write_text(f"{path.read_text()}\n# Do not touch.\n")
    second = add_key(path, "a")

    revoke_key(path, first.id)

    assert "# Do not touch.\n" in path.read_text()
    assert keys_of(path) == {second.id: "a"}


def test_key_itself_may_be_given_to_be_revoked_and_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = add_key(path, "a")

    assert revoke_key(path, key.text) == key.id

    with pytest.raises(KeysFileError) as caught:
        revoke_key(path, key.text)
    assert key.text.split("_")[2] not in str(caught.value)


def test_key_that_was_written_by_hand_must_be_taken_out_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(BY_HAND)

    with pytest.raises(KeysFileError, match="in a form of its own: take it out with an editor"):
        revoke_key(path, "00000001")

    assert path.read_text() == BY_HAND


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = add_key(path, "a")
    os.chown(path, 12345, 54321)

    revoke_key(path, key.id)

    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


def test_program_that_edits_for_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_edit, "LOCK_S_MAX", 0.0)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    with pytest.raises(KeysFileError, match="another program has been editing"):
        add_key(tmp_path / "keys.toml", "a")

    os.close(descriptor)


def test_unknown_key_cannot_be_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, "acme")
    before = path.read_text()

    with pytest.raises(KeysFileError, match=r"has no key 00000000$"):
        revoke_key(path, "00000000")

    assert path.read_text() == before


@pytest.mark.parametrize("more", ["x", "_secret", "\n", "0"])
def test_key_is_not_revoked_by_an_id_with_something_behind_it(tmp_path: Path, more: str) -> None:
    """A bug: what was typed or pasted wrongly revoked a key, and half a key was in the error."""
    path = tmp_path / "keys.toml"
    key = add_key(path, "acme")

    with pytest.raises(KeysFileError, match="a key is revoked by its id") as caught:
        revoke_key(path, key.id + more)

    assert key.id not in str(caught.value)
    assert keys_of(path) == {key.id: "acme"}


def test_part_of_a_key_revokes_nothing_and_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = add_key(path, "acme")

    with pytest.raises(KeysFileError, match="or by the whole key") as caught:
        revoke_key(path, key.text[:-1])

    assert "ub_" not in str(caught.value)
    assert keys_of(path) == {key.id: "acme"}


def test_file_is_written_into_no_file_that_was_there_before(tmp_path: Path) -> None:
    """A bug: who had made it could read it, or write keys into it later."""
    path, prepared = tmp_path / "keys.toml", tmp_path / ".keys.toml.new"
    prepared.write_text("theirs")
    prepared.chmod(0o666)

    with prepared.open() as theirs:
        add_key(path, "acme")
        assert theirs.read() == "theirs"

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_link_that_was_prepared_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".keys.toml.new").symlink_to("theirs")

    add_key(tmp_path / "keys.toml", "acme")

    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "keys.toml").is_symlink()


def test_file_is_written_in_utf_8_in_every_locale(tmp_path: Path) -> None:
    """A bug: with LC_ALL=C, a comment beyond ASCII could not be written."""
    path = tmp_path / "keys.toml"
    path.write_text("# Für alle.\n", encoding="utf-8")
    program = "import sys; from pathlib import Path; from services.access.keys_edit import add_key"
    program += "; add_key(Path(sys.argv[1]), 'acme')"
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

    subprocess.run([sys.executable, "-c", program, path], check=True, env=environment)

    assert path.read_text(encoding="utf-8").startswith("# Für alle.\n")


def test_file_does_not_grow_beyond_what_frontends_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, "acme")
    before = path.read_text()
    monkeypatch.setattr(keys_edit, "FILE_BYTES_MAX", len(before) + 10)

    with pytest.raises(KeysFileError, match="would be larger than"):
        add_key(path, "acme")

    assert path.read_text() == before


def test_file_that_is_wrong_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants")

    with pytest.raises(KeysFileError, match="is not TOML"):
        add_key(path, "acme")

    assert path.read_text() == "[tenants"


@pytest.mark.parametrize("tenant", ["", "Acme", "a b", 'a"', "../x", "a" * 257])
def test_name_that_cannot_be_a_tenants_is_refused(tmp_path: Path, tenant: str) -> None:
    with pytest.raises(KeysFileError, match="cannot be a tenant's name"):
        add_key(tmp_path / "keys.toml", tenant)

    assert not (tmp_path / "keys.toml").exists()


def test_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="cannot be written: No such file"):
        add_key(tmp_path / "none" / "keys.toml", "acme")


def test_programs_that_add_keys_at_once_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    threads = [threading.Thread(target=add_key, args=(path, f"t{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(keys_of(path).values()) == [f"t{number}" for number in range(8)]


def test_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text(BEFORE)
    path = tmp_path / "keys.toml"
    path.symlink_to("real.toml")

    key = add_key(path, "acme")

    assert path.is_symlink()
    assert keys_of(tmp_path / "real.toml") == {key.id: "acme"}
