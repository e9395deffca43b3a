"""The base URLs of a plane's frontends, and the one that is used now."""

from collections.abc import Sequence

import httpx


class Addresses:
    """Shared by all requests of a client, so that a server which is gone is not tried first by each of them."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        """`base_urls`: with or without `/v1` at the end. Raises ValueError if there is none, or one is no HTTP URL.

        A request to any other server is passed on without protection, so a URL that matches none must not be accepted.
        """
        if not base_urls:
            raise ValueError("at least one base URL is needed")
        if isinstance(base_urls, str):
            raise ValueError(f"base URLs are a list, such as [{base_urls!r}]")
        self._urls = [_checked(url).rstrip("/").removesuffix("/v1").rstrip("/") for url in base_urls]
        self._index = 0

    def __len__(self) -> int:
        return len(self._urls)

    @property
    def current(self) -> str:
        """The base URL for the next request, without `/v1`."""
        return self._urls[self._index]

    def leave(self, url: str) -> None:
        """Use the next one. Ignored if another request has done so already."""
        if url == self.current:
            self._index = (self._index + 1) % len(self._urls)

    def path_of(self, url: httpx.URL) -> str | None:
        """The path and query of a request below its base URL; None if it goes to another server."""
        whole = str(url)
        return next((whole.removeprefix(base) for base in self._urls if whole.startswith(f"{base}/")), None)


def _checked(given: str) -> str:
    url = httpx.URL(given)
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError(f"{given!r} is no base URL, such as http://127.0.0.1:8000")
    return str(url)
