"""Variables that name a proxy for other programs change nothing in the plane: no connection goes there.

| workload | nemesis | checker |
| --- | --- | --- |
| every command, over HTTP and gRPC, in memory and over etcd | each variable names a proxy | the proxy is never called |
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.harness.plane.commands import BARE, commands, complete, wait_served
from tests.integration.harness.waiting import wait_until
from tests.registry.support import Etcd

NAMES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


class Recorder:
    """A listener that counts connections and closes them."""

    def __init__(self) -> None:
        self.count = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            with client:
                if client.recv(5) == b"close":
                    return
            self.count += 1

    def close(self) -> None:
        host, port = self.address.split(":")
        with socket.create_connection((host, int(port))) as last:
            last.sendall(b"close")
        self._thread.join()
        self._listener.close()

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a machine with this proxy for everything."""
        url = f"http://{self.address}"
        named = {spelled: url for name in NAMES for spelled in (name, name.upper())}
        enabled = {"GRPC_ADDRESS_HTTP_PROXY": self.address, "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES": "127.0.0.0/8"}
        return {**BARE, **named, **enabled}


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    try:
        yield recorder
    finally:
        recorder.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_no_connection_of_a_plane_goes_to_a_proxy(tmp_path: Path, processes: int) -> None:
    with recording() as proxy, commands(tmp_path, proxy.variables) as plane:
        registry = plane.registry()
        worker = plane.worker(registry, "--metrics-port=0")
        frontend = plane.frontend(registry, f"--processes={processes}").wait_event("frontend ready")
        wait_served(frontend["http"])
        chat = plane.run("chat", f"--url=http://{frontend['http']}", "--max-tokens=4", text="Hi")
        drained = plane.run("drain", f"--registry={registry}", worker.wait_event("worker ready")["instance"])
        wait_until(lambda: worker.process.poll() is not None)

        assert chat.returncode == 0, chat.stderr
        assert drained.returncode == 0, drained.stderr
        assert proxy.count == 0


@pytest.mark.etcd
def test_registry_reaches_etcd_directly(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    etcd.start()
    etcd.wait_listening()
    try:
        with recording() as proxy, commands(tmp_path, proxy.variables) as plane:
            registry = plane.registry("--store=etcd", f"--etcd-endpoints={etcd.endpoint}")
            plane.worker(registry)
            wait_served(plane.frontend(registry).wait_event("frontend ready")["http"])

            assert proxy.count == 0
    finally:
        etcd.kill()


def test_local_cluster_needs_no_proxy(tmp_path: Path) -> None:
    with recording() as proxy, commands(tmp_path, proxy.variables) as plane:
        ports = ("--registry-port=0", "--grpc-port=0", "--http-port=0")
        up = plane.start("up", f"--state-dir={tmp_path / 'run'}", "--log-format=json", "--workers=1", *ports)
        wait_until(lambda: "curl -N http://" in up.log or up.process.poll() is not None, 60)
        address = up.log.partition("curl -N http://")[2].partition("/")[0]

        assert complete(address)[0] == 200
        assert proxy.count == 0


def test_chat_says_that_it_does_not_use_the_proxy(tmp_path: Path) -> None:
    with commands(tmp_path, {**BARE, "http_proxy": "http://127.0.0.1:2"}) as plane:
        done = plane.run("chat", "--url=http://127.0.0.1:1", text="Hi")

    assert done.returncode == 1
    assert "The proxy in http_proxy is not used" in done.stderr
