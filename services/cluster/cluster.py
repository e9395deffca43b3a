"""Starts a local cluster, reports its addresses, supervises it and stops it in order."""

import asyncio
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.cluster.commands import (
    ClusterConfig,
    check_ports,
    frontend_command,
    reachable,
    registry_command,
    worker_command,
)
from services.cluster.console import Console, table
from services.cluster.health import wait_served
from services.cluster.state import STATE_FILE, owned, write_state
from services.runtime.descriptors.standard import discard
from services.runtime.supervision.child import Child, ChildConfig, Command
from services.runtime.supervision.children import start_all, start_until, stop_all

SUPERVISOR = "up"


class Cluster:
    """One registry, workers and frontends as child processes of this process."""

    def __init__(self, config: ClusterConfig, children: ChildConfig, folder: Path) -> None:
        self._config = config
        self._child_config = children
        self._folder = folder
        workers = [f"worker-{number}" for number in range(1, config.workers + 1)]
        frontends = [f"frontend-{number}" for number in range(1, config.frontends + 1)]
        self._console = Console([SUPERVISOR, "registry", *workers, *frontends], sys.stderr)
        without_drain = replace(children, drain_timeout_s=0)  # The registry has no streams of clients.
        self._registry = self._child("registry", partial(registry_command, config), without_drain)
        self._workers = [self._child(name, self._worker_command, children) for name in workers]
        self._frontends = [
            self._child(name, partial(self._frontend_command, index), children) for index, name in enumerate(frontends)
        ]
        self._is_up = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Start the cluster, supervise it until `stopping` is set, then stop it.

        Raises StartupError, alone or in an exception group, if the cluster cannot start.
        """
        with owned(self._folder):
            check_ports(self._config)
            async with asyncio.TaskGroup() as group:
                try:
                    await start_until(stopping, self._start(group))
                finally:
                    await self._stop()

    async def _start(self, group: asyncio.TaskGroup) -> None:
        began = asyncio.get_running_loop().time()
        await start_all([self._registry], group)
        await start_all([*self._workers, *self._frontends], group)
        for frontend in self._frontends:
            models = await wait_served(self._url(frontend), timeout_s=self._child_config.ready_timeout_s)
        self._is_up = True
        self._write_state()
        self._note(f"up after {asyncio.get_running_loop().time() - began:.1f} s; Ctrl-C stops it")
        try:
            print(self._summary(models), flush=True)
        except OSError:  # The terminal is gone, or its disk is full.
            discard(sys.stdout)

    async def _stop(self) -> None:
        """Stop the frontends first, because their streams need the workers, and the registry last."""
        if self._is_up:
            drain_s = self._child_config.drain_timeout_s
            self._note(f"stopping: streams have {drain_s:g} s to finish; a second Ctrl-C exits at once")
        for children in (self._frontends, self._workers, [self._registry]):
            await stop_all(children)

    def _child(self, name: str, command: Command, config: ChildConfig) -> Child:
        return Child(
            name,
            command,
            config,
            console=self._console,
            folder=self._folder,
            on_change=self._write_state,
            rng=random.Random(),
        )

    def _worker_command(self, ready_file: Path, _last: object) -> Sequence[str]:
        return worker_command(self._config, ready_file, registry=self._registry_address())

    def _frontend_command(self, index: int, ready_file: Path, last: dict[str, str]) -> Sequence[str]:
        return frontend_command(self._config, index, ready_file, last, registry=self._registry_address())

    def _registry_address(self) -> str:
        return self._registry.last_ready["address"]

    def _url(self, frontend: Child) -> str:
        scheme = "https" if self._config.is_tls else "http"
        return f"{scheme}://{reachable(frontend.last_ready['http'])}"

    def _write_state(self) -> None:
        """Update `cluster.json`. The file is first written when the whole cluster is up."""
        if not self._is_up:
            return
        registry, workers, frontends = (
            [{"pid": serving.pid, **serving.ready} for child in children if (serving := child.serving) is not None]
            for children in ([self._registry], self._workers, self._frontends)
        )
        state = {"registry": next(iter(registry), None), "workers": workers, "frontends": frontends}
        try:
            write_state(self._folder, state)
        except OSError as error:  # The cluster goes on: its requests need no file.
            self._console.warn(SUPERVISOR, f"cannot write {self._folder / STATE_FILE}: {error.strerror}")

    def _summary(self, models: Sequence[str]) -> str:
        rows = [["name", "pid", "addresses"]]
        for child in (self._registry, *self._workers, *self._frontends):
            if (serving := child.serving) is not None:
                addresses = [f"{kind} {value}" for kind, value in serving.ready.items() if kind != "instance_id"]
                rows.append([child.name, str(serving.pid), ", ".join(addresses)])
        url = self._url(self._frontends[0])
        request = first_request(url, models, self._config.certs)
        return f"\n{table(rows)}\n\nAlso in {self._folder / STATE_FILE}\nTry:\n  {request}\n"

    def _note(self, text: str) -> None:
        self._console.note(SUPERVISOR, text)


def first_request(url: str, models: Sequence[str], certs: Path | None = None) -> str:
    """A command for people to try.

    `models`: none if clients need keys, see `wait_served`. `certs`: see `ClusterConfig`.
    """
    ca = "" if certs is None else f" --cacert {shlex.quote(str(certs / 'ca.pem'))}"
    name = models[0] if models else "MODEL"
    key = "" if models else ' -H "authorization: Bearer $KEY"'
    body = f'{{"model": "{name}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"curl -N{ca} {url}/v1/chat/completions{key} -H 'content-type: application/json' -d {shlex.quote(body)}"
