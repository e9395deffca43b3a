"""A worker that starts at the address of a killed one is not mistaken for it while the dead one is still registered.

Regression: the frontend once took the new process for both workers, and when that process froze, a stream moved from
the one to the other.
"""

import asyncio

from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.waiting import until
from tests.registry.support import free_port


def test_dead_worker_is_not_found_at_an_address_where_another_worker_answers(plane: Plane) -> None:
    there = ["--lease=60", *(f"--{name}=127.0.0.1:{free_port()}" for name in ("listen", "session-listen"))]

    async def scenario() -> None:
        killed = await plane.worker(*there)
        killed.kill()

        again = await plane.worker(*there)
        await until(lambda: again.events("session over"))  # The frontend looked for the dead one there.

        dead = killed.ready["instance_id"]
        assert len(plane.frontend.events_until_now("worker found", instance=dead)) == 1
        assert len(plane.frontend.events_until_now("worker found", instance=again.ready["instance_id"])) == 1

    asyncio.run(scenario())
