"""Adds keys to the keys file, and takes them out again. What people wrote into the file stays as it is."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from services.access.key import NewKey, id_of, make_key
from services.access.keyring import Key, today
from services.access.keys_file import FILE_BYTES_MAX, TENANT_NAME, KeysFileError, keys_in, tenants_in, text_of
from services.runtime.files.replace import replace_file

LOCK_S_MAX = 10.0
"""How long to wait for another program that edits the file."""
_LOOK_S = 0.05
_ID = re.compile("[0-9a-f]{8}")
_HEAD = "# The tenants of this plane, and the hashes of their API keys. See docs/access.md.\n"
_BLOCK = re.compile(r"^\[\[keys\]\]\n(?:[a-z0-9]+ *= *[^\n]*(?:\n|\Z))+", re.MULTILINE)
"""The table of a key as `add_key` writes it. Comments and blank lines end it, so that they stay."""


def add_key(path: Path, tenant: str, expires: date | None = None) -> NewKey:
    """Make a key for a tenant, and write its hash into the file, which is created if there is none.

    A tenant that is not in the file is added, without limits. Raises KeysFileError.
    """
    if not TENANT_NAME.fullmatch(tenant):
        raise KeysFileError(f"{tenant[:64]!r} cannot be a tenant's name: use a-z, 0-9, '.', '_' and '-'")
    key = make_key()
    with _locked(path.resolve()) as file:
        text = text_of(file) if file.exists() else _HEAD
        if tenant not in tenants_in(text, path):
            text = f'{_ended(text)}\n[tenants."{tenant}"]\n'
        block = f'id = "{key.id}"\ntenant = "{tenant}"\nsha256 = "{key.sha256}"\ncreated = {today()}\n'
        block += "" if expires is None else f"expires = {expires}\n"
        text = f"{_ended(text)}\n[[keys]]\n{block}"
        keys_in(text, path)
        _replace(file, text)
    return key


def revoke_key(path: Path, given: str) -> str:
    """Take a key out of the file. `given`: its id, or the key itself. Returns the id.

    Raises KeysFileError if the key is not in the file, or is written in another way than by `add_key`. Its message has
    nothing of what was given but the id.
    """
    key_id = given if _ID.fullmatch(given) else id_of(given)
    if key_id is None:
        raise KeysFileError("a key is revoked by its id, which has 8 characters of 0-9 and a-f, or by the whole key")
    with _locked(path.resolve()) as file:
        text = text_of(file)
        keys = keys_in(text, path)
        rest = [key for key in keys if key.id != key_id]
        if len(rest) == len(keys):
            raise KeysFileError(f"{path} has no key {key_id}")
        shorter = _without(text, key_id)
        if not _has_keys(shorter, rest, path):
            raise KeysFileError(f"{path} has the key {key_id} in a form of its own: take it out with an editor")
        _replace(file, shorter)
    return key_id


def _without(text: str, key_id: str) -> str:
    for found in _BLOCK.finditer(text):
        if re.search(rf'^id *= *"{re.escape(key_id)}"', found[0], re.MULTILINE):
            return text[: found.start()] + text[found.end() :].removeprefix("\n")
    return text


def _has_keys(text: str, keys: list[Key], path: Path) -> bool:
    try:
        return keys_in(text, path) == keys
    except KeysFileError:
        return False


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else text + "\n"


def _replace(file: Path, text: str) -> None:
    """Replace the file, so that readers see the old text or the new one. It keeps its owner and its mode.

    Raises KeysFileError.
    """
    content = text.encode()  # In UTF-8 as it was read, whatever the locale.
    if len(content) > FILE_BYTES_MAX:
        raise KeysFileError(f"the keys file {file} would be larger than {FILE_BYTES_MAX} bytes")
    try:
        replace_file(file, content, like=file.stat() if file.exists() else None)
    except OSError as error:
        raise KeysFileError(f"the keys file {file} cannot be written: {error.strerror}") from error


@contextmanager
def _locked(file: Path) -> Iterator[Path]:
    """One program at a time edits the file. Yields it. Raises KeysFileError."""
    try:
        descriptor = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise KeysFileError(f"the keys file {file} cannot be written: {error.strerror}") from error
    try:
        _lock(descriptor, file)
        yield file
    finally:
        os.close(descriptor)


def _lock(descriptor: int, file: Path) -> None:
    give_up_at = time.monotonic() + LOCK_S_MAX
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise KeysFileError(f"another program has been editing {file} for {LOCK_S_MAX:g} s") from None
            time.sleep(_LOOK_S)
        else:
            return
