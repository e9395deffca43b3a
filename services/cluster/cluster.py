"""Brings a local cluster up, says where it is, keeps it alive and takes it down in order."""

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
from services.runtime.supervision.child import Child, ChildConfig, Command, end_all, start_all, start_until

SUPERVISOR = "up"


class Cluster:
    """One registry, workers and frontends as child processes of this one."""

    def __init__(self, config: ClusterConfig, members: ChildConfig, folder: Path) -> None:
        self._config = config
        self._member_config = members
        self._folder = folder
        workers = [f"worker-{number}" for number in range(1, config.workers + 1)]
        frontends = [f"frontend-{number}" for number in range(1, config.frontends + 1)]
        self._console = Console([SUPERVISOR, "registry", *workers, *frontends], sys.stderr)
        streamless = replace(members, drain_timeout_s=0)
        self._registry = self._member("registry", partial(registry_command, config), streamless)
        self._workers = [self._member(name, self._worker_command, members) for name in workers]
        self._frontends = [
            self._member(name, partial(self._frontend_command, index), members) for index, name in enumerate(frontends)
        ]
        self._is_up = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Bring it up, keep it until `stopping`, take it down. Raises StartupError if it does not come up."""
        with owned(self._folder):
            check_ports(self._config)
            async with asyncio.TaskGroup() as lives:
                try:
                    await start_until(stopping, self._start(lives))
                finally:
                    await self._end()

    async def _start(self, lives: asyncio.TaskGroup) -> None:
        began = asyncio.get_running_loop().time()
        await start_all([self._registry], lives)
        await start_all([*self._workers, *self._frontends], lives)
        for frontend in self._frontends:
            models = await wait_served(self._url(frontend), timeout_s=self._member_config.ready_timeout_s)
        self._is_up = True
        self._write_state()
        self._say(f"up after {asyncio.get_running_loop().time() - began:.1f} s; Ctrl-C ends all")
        print(self._summary(models), flush=True)

    async def _end(self) -> None:
        """Frontends first, whose clients the others serve; the registry last."""
        if self._is_up:
            drain_s = self._member_config.drain_timeout_s
            self._say(f"ending: streams may go on for {drain_s:g} s; Ctrl-C once more ends all at once")
        for row in (self._frontends, self._workers, [self._registry]):
            await end_all(row)

    def _member(self, name: str, command: Command, config: ChildConfig) -> Child:
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
        return self._registry.known["address"]

    def _url(self, frontend: Child) -> str:
        return f"http://{reachable(frontend.known['http'])}"

    def _write_state(self) -> None:
        """Bring `cluster.json` up to date; it is first written when all is up."""
        if not self._is_up:
            return
        registry, workers, frontends = (
            [{"pid": serving.pid, **serving.ready} for member in row if (serving := member.serving) is not None]
            for row in ([self._registry], self._workers, self._frontends)
        )
        write_state(self._folder, {"registry": next(iter(registry), None), "workers": workers, "frontends": frontends})

    def _summary(self, models: Sequence[str]) -> str:
        rows = [["name", "pid", "addresses"]]
        for member in (self._registry, *self._workers, *self._frontends):
            if (serving := member.serving) is not None:
                addresses = [f"{kind} {value}" for kind, value in serving.ready.items() if kind != "instance_id"]
                rows.append([member.name, str(serving.pid), ", ".join(addresses)])
        body = f'{{"model": "{models[0]}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        return (
            f"\n{table(rows)}\n\nThe same for programs: {self._folder / STATE_FILE}\nTry:\n"
            f"  curl -N {self._url(self._frontends[0])}/v1/chat/completions -H 'content-type: application/json'"
            f" -d {shlex.quote(body)}\n"
        )

    def _say(self, text: str) -> None:
        self._console.note(SUPERVISOR, text)
