"""WatchedKeys: the file may change at any time, and one that cannot be used leaves the last keys valid."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.access import keys_watch
from services.access.key import NewKey
from services.access.keyring import Keyring
from services.access.keys_edit import add_key, revoke_key
from services.access.keys_file import KeysFileError, keyring_of
from services.access.keys_watch import LOOK_S, WatchedKeys
from services.core.errors import Failure


def lets_in(keys: WatchedKeys, key: NewKey) -> bool:
    try:
        keys.tenant_of({"x-api-key": key.text})
    except Failure:
        return False
    return True


def test_keys_that_are_added_and_revoked_count_at_the_second_look(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    first = add_key(path, "acme")
    keys = WatchedKeys(path)
    second = add_key(path, "acme")
    assert (lets_in(keys, first), lets_in(keys, second)) == (True, False)

    keys.look()
    assert not lets_in(keys, second), "the file may still be written"
    keys.look()
    assert (lets_in(keys, first), lets_in(keys, second)) == (True, True)

    revoke_key(path, first.id)
    look_twice(keys)
    assert (lets_in(keys, first), lets_in(keys, second)) == (False, True)


def look_twice(keys: WatchedKeys) -> None:
    keys.look()
    keys.look()


@pytest.mark.parametrize("content", ["[tenants", None], ids=["wrong", "gone"])
def test_file_that_cannot_be_used_leaves_the_keys_valid_and_is_logged_once(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys.toml"
    key = add_key(path, "acme")
    keys = WatchedKeys(path)
    before = path.read_text()
    if content is None:
        path.unlink()
    else:
        path.write_text(content)

    with capture_logs() as logs:
        look_twice(keys)
        look_twice(keys)

    assert lets_in(keys, key)
    assert [one["event"] for one in logs] == ["the keys file cannot be used: the keys before it stay valid"]

    path.write_text(before)
    revoke_key(path, key.id)
    look_twice(keys)
    assert not lets_in(keys, key)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_that_can_be_read_again_counts_though_its_content_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    first, second = add_key(path, "acme"), add_key(path, "acme")
    keys = WatchedKeys(path)
    revoke_key(path, first.id)
    path.chmod(0)
    look_twice(keys)
    assert lets_in(keys, first)

    path.chmod(0o600)
    look_twice(keys)

    assert (lets_in(keys, first), lets_in(keys, second)) == (False, True)


def test_content_that_cannot_be_used_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: it was parsed at each look, which held up the event loop of a frontend as long as the file was wrong."""
    path, parsed = tmp_path / "keys.toml", []
    add_key(path, "acme")
    keys = WatchedKeys(path)

    def count(text: str, path: Path) -> Keyring:
        parsed.append(text)
        return keyring_of(text, path)

    monkeypatch.setattr(keys_watch, "keyring_of", count)
    for content in ("[tenants", "[tenants."):
        path.write_text(content)
        look_twice(keys)
        look_twice(keys)

    assert parsed == ["[tenants", "[tenants."]


def test_file_that_cannot_be_read_is_read_again_though_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network that fails for a moment."""
    path = tmp_path / "keys.toml"
    add_key(path, "acme")
    keys = WatchedKeys(path)
    second = add_key(path, "acme")

    def fail(path: Path) -> str:
        raise KeysFileError(f"the keys file {path} cannot be read: Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(keys_watch, "text_of", fail)
        look_twice(keys)
    assert not lets_in(keys, second)

    keys.look()
    assert lets_in(keys, second)


def test_change_counts_within_a_second_as_the_command_says() -> None:
    """The change comes right after a look, and counts at the second one after it."""
    assert 2 * LOOK_S <= 0.5, "the other half of the second is for a file of FILE_BYTES_MAX"


def test_file_that_changes_at_each_look_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = add_key(path, "acme")
    keys = WatchedKeys(path)

    for size in range(3):
        path.write_text("#" * size)  # As an editor does that writes in place.
        keys.look()

    assert lets_in(keys, key)


def test_file_that_cannot_be_used_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="cannot be read"):
        WatchedKeys(tmp_path / "keys.toml")


def test_link_that_refers_to_another_file_is_noticed(tmp_path: Path) -> None:
    """As Kubernetes changes a mounted secret."""
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    first, second = add_key(old, "acme"), add_key(new, "acme")
    path = tmp_path / "keys.toml"
    path.symlink_to(old)
    keys = WatchedKeys(path)
    assert lets_in(keys, first)

    path.unlink()
    path.symlink_to(new)
    look_twice(keys)

    assert (lets_in(keys, first), lets_in(keys, second)) == (False, True)
