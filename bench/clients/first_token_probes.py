"""A few clients that send short requests again and again and measure the time to the first token."""

import http.client
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

from bench.clients.requests import PATH, request_body
from bench.clients.wrk import REPLY_S_MAX
from bench.measure.errors import BenchError

TOKENS = 2
PAUSE_S = 0.01
CLIENTS = 4


@contextmanager
def probing(url: str) -> Iterator[list[float]]:
    """Probe while the context is open; yields the list that collects the seconds to the first token.

    Raises BenchError on exit if a probe was refused.
    """
    first_tokens_s: list[float] = []
    is_over = threading.Event()

    def probe() -> None:
        while not is_over.is_set():
            first_tokens_s.append(first_token_seconds(url))
            is_over.wait(PAUSE_S)

    with ThreadPoolExecutor(CLIENTS) as pool:
        probes = [pool.submit(probe) for _ in range(CLIENTS)]
        try:
            yield first_tokens_s
        finally:
            is_over.set()
        for one in probes:
            one.result()


def first_token_seconds(url: str) -> float:
    """Return the time from a request on a new connection to the first event. Raises BenchError if it is refused."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=REPLY_S_MAX)
    try:
        began = time.perf_counter()
        connection.request("POST", PATH, request_body(TOKENS), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.readline()
        elapsed_s = time.perf_counter() - began
        if response.status != http.client.OK:
            raise BenchError(f"a probe got status {response.status}")
        response.read()
    finally:
        connection.close()
    return elapsed_s
