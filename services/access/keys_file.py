"""Reads the keys file: tenants with their limits, and the hashes of keys, in TOML.

[tenants.acme]
weight = 3.0

[[keys]]
id = "1f2e3d4c"
tenant = "acme"
sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
created = 2026-11-29
"""

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from services.access.keyring import Key, Keyring
from services.core.tenant import TENANT_NAME_CHARACTERS_MAX, WEIGHT_MAX, WEIGHT_MIN, Tenant
from services.core.validation import COUNT_MAX
from services.runtime.process import StartupError

FILE_BYTES_MAX = 1024 * 1024
"""Room for 8,000 keys. tomllib takes about 0.4 s for them, and changes are to count within a second."""
TENANT_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{TENANT_NAME_CHARACTERS_MAX - 1}}}")


class KeysFileError(StartupError):
    """The keys file cannot be used. The message says what is wrong with it."""


_Rate = Annotated[float, Meta(gt=0, le=1e12)]


class _Tenant(Struct, forbid_unknown_fields=True, kw_only=True):
    weight: Annotated[float, Meta(ge=WEIGHT_MIN, le=WEIGHT_MAX)] = 1.0
    queue_timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    models: list[str] | None = None
    requests_per_minute: _Rate | None = None
    tokens_per_minute: _Rate | None = None
    requests_at_once: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = None


class _Key(Struct, forbid_unknown_fields=True, kw_only=True):
    id: Annotated[str, Meta(pattern="^[0-9a-f]{8}$")]
    tenant: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    created: date
    expires: date | None = None


class _File(Struct, forbid_unknown_fields=True):
    tenants: dict[str, _Tenant] = {}
    keys: list[_Key] = []


def keyring_of(text: str, path: Path) -> Keyring:
    """The keys of the file with this text. `path`: for messages. Raises KeysFileError."""
    return Keyring({key.id: key for key in keys_in(text, path)})


def text_of(path: Path) -> str:
    """The text of the file. Raises KeysFileError."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise KeysFileError(f"the keys file {path} is larger than {FILE_BYTES_MAX} bytes")
        return content.decode()
    except OSError as error:
        raise KeysFileError(f"the keys file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeysFileError(f"the keys file {path} is not text in UTF-8") from error


def keys_in(text: str, path: Path) -> list[Key]:
    """The keys of the file with this text. `path`: for messages. Raises KeysFileError."""
    file = _parsed(text, path)
    tenants = {name: _tenant(name, given, path) for name, given in file.tenants.items()}
    keys: dict[str, Key] = {}
    for given in file.keys:
        if given.tenant not in tenants:
            raise KeysFileError(f"{path}: the key {given.id} is of the tenant {given.tenant!r}, which has no table")
        if given.id in keys:
            raise KeysFileError(f"{path}: the key {given.id} is defined twice")
        keys[given.id] = Key(given.id, tenants[given.tenant], given.sha256, given.expires)
    return list(keys.values())


def tenants_in(text: str, path: Path) -> set[str]:
    """The names of the tenants of the file with this text. Raises KeysFileError."""
    return set(_parsed(text, path).tenants)


def _parsed(text: str, path: Path) -> _File:
    try:
        return msgspec.convert(tomllib.loads(text), _File)
    except msgspec.ValidationError as error:
        raise KeysFileError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:  # Also of numbers and nesting without end.
        raise KeysFileError(f"{path} is not TOML: {error}") from error


def _tenant(name: str, given: _Tenant, path: Path) -> Tenant:
    if not TENANT_NAME.fullmatch(name):
        raise KeysFileError(f"{path}: {name[:64]!r} cannot be a tenant's name: use a-z, 0-9, '.', '_' and '-'")
    return Tenant(
        name=name,
        weight=given.weight,
        queue_timeout_s=given.queue_timeout,
        models=None if given.models is None else frozenset(given.models),
        requests_per_minute=given.requests_per_minute,
        tokens_per_minute=given.tokens_per_minute,
        requests_at_once=given.requests_at_once,
    )
