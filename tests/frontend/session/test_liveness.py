"""Liveness: when a worker counts as lost although its connection is open."""

import math
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.frontend.session import liveness as module
from services.frontend.session.liveness import Liveness, LivenessConfig
from services.frontend.session.writer import UNTAKEN_S_MAX
from services.stubs.worker_pb2 import Load, RankLoad

CONFIG = LivenessConfig(stall_s=1.0, idle_stall_s=10.0, engine_stall_s=5.0, prefill_stall_s=60.0)
PREFILL, DECODE = [RankLoad(active_prefill_tokens=5)], [RankLoad(active_prefill_tokens=0)]


class Watched:
    """A worker's liveness and the time, which the test sets. The connection takes everything unless the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.liveness = Liveness("worker i", CONFIG, lambda: self.now)
        self.stuck_at = math.inf

    def hear(self, at: float, load: Load | None = None, *, has_tokens: bool = False) -> None:
        """A message of the worker."""
        self.now = at
        self.liveness.on_message()
        if load is not None:
            self.liveness.on_load(load)
        if has_tokens:
            self.liveness.on_step()

    def check(self, at: float, *, has_streams: bool = True) -> float:
        return self.liveness.check(at, has_streams=has_streams, stuck_at=self.stuck_at)

    def lost_at(self, *, has_streams: bool = True) -> float:
        """The time at which it counts as lost, and not a moment before."""
        due = self.check(self.now, has_streams=has_streams)
        assert self.check(due - 0.01, has_streams=has_streams) == due
        with pytest.raises(Failure) as caught:
            self.check(due, has_streams=has_streams)
        assert caught.value.reason is Reason.STALLED
        assert "worker i" in caught.value.detail
        return due


def rows_of_table() -> list[list[str]]:
    lines = [line for line in (module.__doc__ or "").splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


def silent_with_streams(_: Watched) -> dict[str, Any]:
    return {"has_streams": True}


def silent_without_streams(_: Watched) -> dict[str, Any]:
    return {"has_streams": False}


def standing_still(watched: Watched) -> dict[str, Any]:
    watched.hear(0, Load(running=1, engine_steps=1, ranks=DECODE))
    watched.hear(4.5, Load(running=1, engine_steps=1, ranks=DECODE))
    return {"has_streams": True}


def computing_a_prompt(watched: Watched) -> dict[str, Any]:
    watched.hear(0, Load(running=1, engine_steps=1, ranks=PREFILL))
    watched.hear(59.5, Load(running=1, engine_steps=1, ranks=PREFILL))
    return {"has_streams": True}


def reading_nothing(watched: Watched) -> dict[str, Any]:
    watched.stuck_at = UNTAKEN_S_MAX
    watched.hear(UNTAKEN_S_MAX - 0.5)
    return {"has_streams": True}


PLAYS = {
    "no message, with streams on the session": (silent_with_streams, CONFIG.stall_s),
    "no message, without streams": (silent_without_streams, CONFIG.idle_stall_s),
    "no step of the engine, with streams and sequences that run": (standing_still, CONFIG.engine_stall_s),
    "the same in a step that computes a prompt, or while the engine does not say what it computes": (
        computing_a_prompt,
        CONFIG.prefill_stall_s,
    ),
    "nothing read of what is sent to the worker": (reading_nothing, UNTAKEN_S_MAX),
}


def test_every_sign_in_the_table_has_a_play_and_every_play_a_sign() -> None:
    assert [sign for sign, _ in rows_of_table()] == list(PLAYS)


@pytest.mark.parametrize(("sign", "limit"), rows_of_table())
def test_worker_counts_as_lost_after_the_limit_in_the_table(sign: str, limit: str) -> None:
    set_up, limit_s = PLAYS[sign]
    name = limit.split("`")[1]
    assert (UNTAKEN_S_MAX if name.isupper() else getattr(CONFIG, name)) == limit_s
    watched = Watched()

    how = set_up(watched)

    assert watched.lost_at(**how) == limit_s


@pytest.mark.parametrize(
    ("load", "due"),
    [
        (Load(engine_steps=1, ranks=DECODE), 5.5),
        (Load(running=1, engine_steps=1), 5.5),
        (Load(running=1, engine_steps=1, ranks=[*DECODE, *PREFILL]), 5.5),
        (Load(running=1, engine_steps=1, ranks=DECODE), 5.0),
    ],
    ids=["no sequence runs", "the engine reports no ranks", "a rank computes a prompt", "all ranks decode"],
)
def test_engine_limit_counts_only_while_every_rank_says_that_it_decodes(load: Load, due: float) -> None:
    """Otherwise the worker counts as lost 1 s after its last message, at 5.5 s."""
    watched = Watched()
    watched.hear(0, load)
    watched.hear(4.5, load)

    assert watched.check(4.5) == due


def test_step_with_the_prompt_of_a_cancelled_request_may_take_as_long_as_one_with_a_prompt() -> None:
    """A bug: the worker was lost to all its streams when the client left whose prompt its engine still computed."""
    watched = Watched()
    watched.hear(0, Load(running=2, engine_steps=1, ranks=PREFILL))
    watched.hear(4.5, Load(running=1, engine_steps=1, ranks=DECODE))

    assert watched.check(4.5) == 5.5, "only silence counts"

    watched.hear(6, Load(running=1, engine_steps=2, ranks=DECODE))
    watched.hear(10.5, Load(running=1, engine_steps=2, ranks=DECODE))

    assert watched.check(10.5) == 11


def test_engine_without_streams_of_this_frontend_may_stand_still() -> None:
    watched = Watched()
    for second in (0, 8):
        watched.hear(second, Load(running=1, engine_steps=1, ranks=DECODE))

    assert watched.check(8, has_streams=False) == 18


@pytest.mark.parametrize("progress", ["steps", "tokens"])
def test_step_count_and_tokens_both_prove_that_the_engine_makes_steps(progress: str) -> None:
    watched = Watched()
    watched.hear(0, Load(running=1, engine_steps=1, ranks=DECODE))
    watched.hear(4.5, Load(running=1, engine_steps=1, ranks=DECODE))

    if progress == "steps":
        watched.hear(4.75, Load(running=1, engine_steps=2, ranks=DECODE))
    else:
        watched.hear(4.75, has_tokens=True)
    watched.hear(9.5)

    assert watched.check(9.5) == 9.75


def test_restart_forgets_silence_and_standstill() -> None:
    watched = Watched()
    watched.hear(0, Load(running=1, engine_steps=1, ranks=DECODE))

    watched.liveness.restart(100.0)

    assert watched.check(100.0) == 101.0
    watched.hear(104.5)
    assert watched.check(104.5) == 105.0


def test_silence_is_reported_before_a_standstill() -> None:
    watched = Watched()
    watched.hear(0, Load(running=1, engine_steps=1, ranks=DECODE))

    with pytest.raises(Failure, match=r"nothing was heard from worker i for 1\.0 s"):
        watched.check(100.0)
