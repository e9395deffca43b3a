"""Shared by the tests of the registry: a real etcd, a TCP proxy that can cut it off, and registries."""

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from etcd3aio import Etcd3Client

from services.core.errors import Failure
from services.registry.config import EtcdConfig
from services.registry.service import RegistryService
from services.registry.store import Store
from services.rpc.status import CHANNEL_OPTIONS
from services.stubs.registry_pb2 import INSTANCE_STATE_SERVING, Instance, RegisterRequest
from services.stubs.registry_pb2_grpc import RegistryStub, add_RegistryServicer_to_server
from tests.http.rpcs import serving_at
from tests.support.clock import WAIT_S
from tests.support.raw_session import serve_connections

PORTS = range(20_000, 30_000)
"""Below the ephemeral ports, which the kernel assigns to outgoing connections."""
PORT_TRIES_MAX = 100


def instance(instance_id: str = "w1", **fields: Any) -> Instance:
    """A complete record."""
    given: dict[str, Any] = {"address": "127.0.0.1:9000", "model": "mocker", "state": INSTANCE_STATE_SERVING} | fields
    return Instance(instance_id=instance_id, **given)


def register(record: Instance, lease_s: int = 10) -> RegisterRequest:
    request = RegisterRequest(instance=record)
    request.lease.FromSeconds(lease_s)
    return request


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition` returns something true, and return that."""
    async with asyncio.timeout(WAIT_S):
        while not (value := condition()):
            await asyncio.sleep(0.01)
    return value


def free_port() -> int:
    """A port that nothing else uses until this process ends: for servers that start late or restart."""
    for port in random.sample(PORTS, PORT_TRIES_MAX):
        with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as claim, socket.socket() as listener:
            claim.bind(("127.0.0.1", port))  # A claim among the tests: nothing else uses UDP.
            listener.bind(("127.0.0.1", port))
            claim.detach()
            return port
    raise AssertionError("no port is free")


class Etcd:
    """A real etcd with one member, on ports that stay the same across restarts."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        self.data = folder / "data"
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._scheme = scheme
        self._options = options
        self._peer = f"http://127.0.0.1:{free_port()}"
        self._log = folder / "etcd.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> EtcdConfig:
        return EtcdConfig(endpoints=(self.endpoint,))

    def start(self) -> None:
        """Start it; see `wait_listening`. Short election timeouts allow leases of 1 s."""
        program = shutil.which("etcd")
        assert program is not None, "these tests need etcd: install it (Debian: apt-get install etcd-server)"
        url = f"{self._scheme}://{self.endpoint}"
        flags = {
            "--data-dir": str(self.data),
            "--listen-client-urls": url,
            "--advertise-client-urls": url,
            "--listen-peer-urls": self._peer,
            "--initial-advertise-peer-urls": self._peer,
            "--initial-cluster": f"default={self._peer}",
            "--heartbeat-interval": "20",
            "--election-timeout": "200",
            "--unsafe-no-fsync": None,
        }
        words = [word for flag in flags.items() for word in flag if word is not None]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([program, *words, *self._options], stdout=log, stderr=log)

    def wait_listening(self) -> None:
        host, port = self.endpoint.split(":")
        give_up_at = time.monotonic() + WAIT_S
        while True:
            try:
                socket.create_connection((host, int(port)), WAIT_S).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < give_up_at, self._log.read_text()
                time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def wipe(self) -> None:
        shutil.rmtree(self.data)


class Proxy:
    """A TCP proxy to `target` that can cut connections, refuse new ones, and delay each by `delay_s`."""

    def __init__(self, target: str, *, delay_s: float = 0.0) -> None:
        self.accepted_count = 0
        self._delay_s = delay_s
        self._target = target
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.endpoint = f"127.0.0.1:{free_port()}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        host, port = self.endpoint.split(":")
        async with serve_connections(self._serve, host, int(port)):
            try:
                yield self.endpoint
            finally:
                self.cut()

    def cut(self) -> None:
        self._is_cut = True
        for writer in tuple(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted_count += 1
        if self._is_cut:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            await asyncio.sleep(self._delay_s)
            host, port = self._target.split(":")
            with suppress(OSError):  # The target is away: the client loses its connection.
                await self._join(reader, writer, *await asyncio.open_connection(host, int(port)))
        finally:
            self._writers.discard(writer)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there_reader: asyncio.StreamReader,
        there_writer: asyncio.StreamWriter,
    ) -> None:
        self._writers.add(there_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, there_writer))
                group.create_task(self._copy(there_reader, writer))
        finally:
            self._writers.discard(there_writer)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while (data := await reader.read(65536)) and not writer.is_closing():
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.transport.abort()


@asynccontextmanager
async def running(*stores: Store) -> AsyncIterator[None]:
    """Run the stores, and wait until each has reached its storage."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(store.run()) for store in stores]
        try:
            await until(lambda: all(store.cache.is_known for store in stores))
            yield
        finally:
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def served(store: Store, port: int = 0) -> AsyncIterator[str]:
    """Serve a registry on the store. Yields its address."""
    async with serving_at((add_RegistryServicer_to_server, RegistryService(store)), port=port) as address:
        yield address


@asynccontextmanager
async def client(address: str) -> AsyncIterator[Any]:
    """A stub on its own channel. Its streams break at the end of the block."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield RegistryStub(channel)


class Registry:
    """`unbroken registry` as a process, with its log."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self._ready, self._log = folder / "ready", folder / "log"
        self._ready.unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services", "registry", "--ready-file", str(self._ready), *options],
                env={**os.environ, **environment},
                stderr=log,
            )

    async def address(self) -> str:
        await until(self._ready.exists)
        address: str = json.loads(self._ready.read_text())["address"]
        return address

    def log(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        return self.process.wait(WAIT_S)


@asynccontextmanager
async def started_registry(folder: Path, *options: str, **environment: str) -> AsyncIterator[Registry]:
    """A registry process, killed at the end."""
    registry = Registry(folder, *options, **environment)
    try:
        yield registry
    finally:
        registry.process.kill()
        registry.process.wait()


async def put(store: Store, instance_id: str, lease_s: int = 300) -> None:
    await store.put(instance(instance_id), await store.grant(lease_s), takes_over=True)


def ids(store: Store) -> list[str]:
    return [record.instance_id for record in store.cache.instances()]


async def until_stored(store: Store, instance_id: str) -> None:
    """Put a record as soon as the store can be reached."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await put(store, instance_id)
            except Failure:
                await asyncio.sleep(0.02)


async def compact(etcd: Etcd, revision: int) -> None:
    async with Etcd3Client([etcd.endpoint]) as client:
        assert client.kv is not None
        await client.kv.compact(revision, physical=True, timeout=WAIT_S)
