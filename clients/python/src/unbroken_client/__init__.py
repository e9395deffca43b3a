"""Clients for httpx that survive the loss of a server: see `httpx_client` and `async_httpx_client`."""

from unbroken_client.retries import RetryPolicy
from unbroken_client.transports import AsyncHealingTransport, HealingTransport, async_httpx_client, httpx_client

__all__ = ["AsyncHealingTransport", "HealingTransport", "RetryPolicy", "async_httpx_client", "httpx_client"]
