"""The tenants of simulated planes, their keys, and the file that has them."""

import tempfile
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from services.access.key import PREFIX, NewKey
from simulation.scenario.plan import TENANTS


def _key(number: int) -> NewKey:
    """A key that is the same in every run."""
    body = f"{PREFIX}_{number:08x}_{number:064x}"
    return NewKey(f"{number:08x}", f"{body}_{zlib.crc32(body.encode()):08x}")


KEYS: Mapping[str, NewKey] = {tenant: _key(number) for number, tenant in enumerate(TENANTS)}
"""By tenant."""


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="unbroken-simulation-")


@cache
def keys_file() -> Path:
    """The keys file of all runs of this process."""
    text = ""
    for tenant, key in KEYS.items():
        text += f"[tenants.{tenant}]\n[[keys]]\nid = '{key.id}'\ntenant = '{tenant}'\n"
        text += f"sha256 = '{key.sha256}'\ncreated = 2026-01-01\n"
    file = Path(_folder().name) / "keys.toml"
    file.write_text(text)
    return file
