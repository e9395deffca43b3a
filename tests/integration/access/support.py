"""Planes whose clients need keys."""

from pathlib import Path

import httpx

from services.access.key import NewKey
from services.access.keys_edit import add_key
from tests.integration.conftest import Start
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.waiting import until
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async

TOKEN = "token-of-the-operator"


class Keyed:
    """A plane whose frontend has two tenants, a key of each, and an admin token."""

    def __init__(self, start_plane: Start, folder: Path, *worker: str, tenants: str = "") -> None:
        """`worker`: its options. `tenants`: their tables in the keys file."""
        self.file = folder / "keys.toml"
        self.file.write_text(tenants)
        self.acme, self.other = add_key(self.file, "acme"), add_key(self.file, "other")
        options = (f"--keys-file={self.file}", f"--admin-token={TOKEN}", "--log-level=debug")
        self.plane: Plane = start_plane(frontend=options)
        self.worker = run_async(self.plane.worker(*worker))

    def http(self, *, is_http2: bool = False) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.plane.frontend.http, http1=not is_http2, http2=is_http2, timeout=WAIT_S)


async def until_status(client: httpx.AsyncClient, key: NewKey, status: int) -> None:
    """Wait until the frontend answers requests with this key so: it reads its file now and then."""

    async def has_status() -> bool:
        return (await client.get("/v1/models", headers=bearer(key))).status_code == status

    await until(has_status)


def bearer(key: NewKey) -> dict[str, str]:
    return {"authorization": f"Bearer {key.text}"}
