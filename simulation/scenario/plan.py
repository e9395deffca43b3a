"""The plan of a run: the plane, the requests and the faults, drawn from a seed. A plan is data: it can be shortened."""

import random
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

SLOTS_ENOUGH = 64
REQUESTS_S = 3.0
"""Requests and faults begin within this time, once the plane is up."""

Reader = Literal["normal", "slow", "leaves", "cancels", "goes on"]
FaultKind = Literal[
    "kill", "freeze", "drain", "partition", "one_way", "latency", "vanish_registry", "freeze_registry", "jump"
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
STOP_STRINGS = ("e ", "a", "in", "é", "語", "🎉", "tho")


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """One request.

    `frontend`: to which it is sent. `reader`: what its client does; `after`: when it does so, in tokens. One that "goes
    on" loses its connection and sends the request again with the tokens that it has. `drops`: after how many tokens the
    client loses its connection and comes back, for an answer that is kept. `grace_s`: how long it is kept for a client
    that is away. `rival_of`: the number of another client, whose answer this one resumes.
    """

    number: int
    at_s: float
    frontend: int
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    is_streamed: bool = True
    is_grpc: bool = False
    is_kept: bool = False
    grace_s: float = 5.0
    deadline_s: float | None = None
    reader: Reader = "normal"
    after: int = 0
    drops: tuple[int, ...] = ()
    rival_of: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A disturbance. `target`: the process. `other`: the other end of what is disturbed between two processes."""

    at_s: float
    kind: FaultKind
    target: str
    other: str = ""
    duration_s: float = 0.0

    def __str__(self) -> str:
        between = f" and {self.other}" if self.other else ""
        lasting = f" for {self.duration_s:.3f} s" if self.duration_s else ""
        return f"{self.kind} {self.target}{between}{lasting}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run. `turn_s_max`: how long an iteration of an event loop takes at most. `latency_s`: of the network."""

    seed: int
    workers: int
    frontends: int
    slots: int
    places: int
    itl_ms: float
    turn_s_max: float
    latency_s: float
    buffer_bytes: int
    heartbeat_s: float
    drain_s: float
    requests: tuple[RequestPlan, ...] = field(default=())
    faults: tuple[Fault, ...] = field(default=())

    def without(self, *, request: int | None = None, fault: int | None = None) -> "Plan":
        """The plan without one of its requests, or of its faults, by index."""
        if request is not None:
            return replace(self, requests=self.requests[:request] + self.requests[request + 1 :])
        assert fault is not None
        return replace(self, faults=self.faults[:fault] + self.faults[fault + 1 :])


def draw_plan(seed: int) -> Plan:
    """The plan of a seed. Each run has some kinds of faults and not others ("swarm")."""
    chance = random.Random(f"{seed}/plan")
    is_tight = chance.random() < 0.3
    plan = Plan(
        seed=seed,
        workers=chance.choice([1, 2]) if is_tight else chance.choice([1, 2, 2, 3]),
        frontends=2 if is_tight else chance.choice([1, 2, 2]),
        slots=chance.choice([1, 2]) if is_tight else SLOTS_ENOUGH,
        places=chance.choice([0, 1, 3]) if is_tight else SLOTS_ENOUGH,
        itl_ms=chance.choice([2.0, 10.0, 30.0]),
        turn_s_max=chance.choice([0.0, 0.000_05, 0.002]),
        latency_s=chance.choice([0.000_02, 0.000_5, 0.01]),
        buffer_bytes=chance.choice([2048, 16 * 1024, 256 * 1024]),
        heartbeat_s=chance.choice([0.25, 0.05]),
        drain_s=chance.choice([0.05, 0.5, 5.0]),
    )
    count = chance.choice([8, 12]) if is_tight else chance.choice([2, 4, 8])
    requests = [_request(chance, number, plan) for number in range(count)]
    kept = [request for request in requests if request.is_kept]
    if kept and chance.random() < 0.3:
        requests.append(_rival(chance, chance.choice(kept), count))
    plan = replace(plan, requests=tuple(requests))
    return replace(plan, faults=_faults(chance, plan))


def _request(chance: random.Random, number: int, plan: Plan) -> RequestPlan:
    reader: Reader = chance.choice(get_args(Reader)) if chance.random() < 0.4 else "normal"
    is_kept = reader in ("normal", "cancels") and chance.random() < 0.5
    max_tokens = chance.choice([1, 5, 20, 60, 60]) if reader != "slow" else chance.choice([20, 600])
    drop_count = chance.choice([0, 1, 1, 2]) if is_kept else 0
    is_grpc = chance.random() < 0.4
    return RequestPlan(
        number=number,
        at_s=chance.random() * REQUESTS_S if chance.random() < 0.6 else 0.5,
        frontend=chance.randrange(plan.frontends),
        prompt="".join(chance.choice("abcdefghij klmnop") for _ in range(chance.choice([1, 6, 40]))),
        max_tokens=max_tokens,
        temperature=chance.choice([0.0, 0.75]),  # Exact in 32 bits, as it travels.
        seed=chance.randrange(1 << 31),
        n=_choices(chance, plan, reader),
        stop=tuple(chance.sample(STOP_STRINGS, 2)) if chance.random() < 0.25 else (),
        logprobs=chance.choice([None, None, None, 0, 2]),
        is_grpc=is_grpc,
        is_streamed=is_grpc or is_kept or reader != "normal" or chance.random() < 0.8,
        is_kept=is_kept,
        deadline_s=chance.choice([0.05, 0.3, 1.0]) if chance.random() < 0.15 else None,
        reader=reader,
        after=chance.randrange(max_tokens + 1),
        drops=tuple(sorted(chance.randrange(max_tokens + 1) for _ in range(drop_count))),
    )


def _choices(chance: random.Random, plan: Plan, reader: Reader) -> int:
    if reader == "goes on":
        return 1  # A client of one answer sends its tokens as `generated_token_ids`.
    return chance.choice([1, 1, 2, 3]) if plan.slots == SLOTS_ENOUGH else chance.randint(1, plan.slots)


def _rival(chance: random.Random, request: RequestPlan, number: int) -> RequestPlan:
    """Another client that comes for the same answer."""
    return replace(
        request,
        number=number,
        rival_of=request.number,
        at_s=request.at_s + chance.random() * 0.5,
        reader="normal",
        drops=(),
    )


def _faults(chance: random.Random, plan: Plan) -> tuple[Fault, ...]:
    kinds = [kind for kind in FAULT_KINDS if chance.random() < 0.4]
    count = chance.choice([0, 1, 2, 4, 6])
    faults = [_fault(chance, chance.choice(kinds), plan) for _ in range(count) if kinds]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _fault(chance: random.Random, kind: FaultKind, plan: Plan) -> Fault:
    """A fault while a request is under way, most of the time."""
    request = chance.choice(plan.requests)
    lasts_s = request.max_tokens * plan.itl_ms * 1e-3 + 0.02
    at_s = request.at_s + chance.random() * lasts_s if chance.random() < 0.8 else chance.random() * REQUESTS_S
    workers = [f"worker-{number}" for number in range(plan.workers)]
    frontends = [f"frontend-{number}" for number in range(plan.frontends)]
    ends = [chance.choice(workers), chance.choice([*frontends, *frontends, "registry"])]
    target, other = chance.choice(workers) if chance.random() < 0.75 else chance.choice(frontends), ""
    if kind in ("partition", "one_way", "latency"):
        chance.shuffle(ends)
        target, other = ends
    elif kind in ("vanish_registry", "freeze_registry"):
        target = "registry"
    return Fault(at_s=at_s, kind=kind, target=target, other=other, duration_s=chance.choice([0.02, 0.2, 1.0, 4.0]))
