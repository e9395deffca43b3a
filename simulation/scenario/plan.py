"""The plan of a run: the plane, the requests and the faults. A plan is data: it can be printed and shortened."""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

SLOTS_ENOUGH = 64
RECORDS_ENOUGH = 4096
BYTES_ENOUGH = 4 * 1024 * 1024
TENANTS = ("acme", "other")

Reader = Literal["normal", "slow", "leaves", "cancels", "goes on"]
Wire = Literal["http1", "http2", "grpc"]
FaultKind = Literal[
    "kill",
    "freeze",
    "drain",
    "partition",
    "one_way",
    "latency",
    "vanish_registry",
    "freeze_registry",
    "jump",
    "lie",
    "fill",
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
WIRES: tuple[Wire, ...] = get_args(Wire)
HERE, THERE, ELSEWHERE = "here", "there", "elsewhere"
"""Targets of a fault that strikes at a moment: the frontend where it comes, the worker it concerns, and another."""


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """One request.

    `frontend`: to which it is sent. `prompts`: several are sent as a list, over HTTP. `reader`: what its client does;
    `after`: when it does so, in tokens. One that "goes on" loses its connection and sends the request again with the
    tokens that it has. `drops`: after how many tokens the client loses its connection and comes back, for an answer
    that is kept. `grace_s`: how long it is kept for a client that is away; `away_s`: how long the client stays away.
    `migration_limit`: the client's own. `rival_of`: the number of another client, whose answer this one resumes.
    `tenant`: whose key the client has; empty: the plane has no keys. `is_foreign`: its rival is another tenant's; such
    a client tries to cancel the answer, too.
    """

    number: int
    at_s: float
    frontend: int
    prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    seed: int
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    is_streamed: bool = True
    wire: Wire = "http1"
    is_kept: bool = False
    grace_s: float = 5.0
    away_s: float = 0.25
    deadline_s: float | None = None
    migration_limit: int | None = None
    reader: Reader = "normal"
    after: int = 0
    drops: tuple[int, ...] = ()
    rival_of: int | None = None
    tenant: str = ""
    is_foreign: bool = False

    @property
    def choice_count(self) -> int:
        """How many choices its answer has."""
        return self.n * len(self.prompts)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A disturbance.

    `moment`: strikes `at_s` after it has come `nth` times (`moments.py`); empty: `at_s` after the plane has settled.
    `target`: the process, or which of those that the moment concerns. `other`: the other end of what is disturbed
    between two processes.
    """

    at_s: float
    kind: FaultKind
    target: str
    other: str = ""
    duration_s: float = 0.0
    moment: str = ""
    nth: int = 1

    def __str__(self) -> str:
        between = f" and {self.other}" if self.other else ""
        lasting = f" for {self.duration_s:.3f} s" if self.duration_s else ""
        return f"{self.kind} {self.target}{between}{lasting}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run.

    `slots`, `places`: N and Q of each worker. `wait_s`: how long a request may wait for a slot. `refusals`: how many
    submissions each engine refuses, from the first on. `prefill_us`: what each token of a prompt takes the engine.
    `odd_worker`: whether the last worker has another model card than the others, so that it cannot stand in for them.
    `records_max`: how many records of answers a worker keeps without an owner.
    `client_bytes_max`: how much a client may leave unread.
    `splits_ends`: whether workers send some ends of streams later than others, as they may.
    `turn_s_max`: how long an iteration of an event loop takes at most. `latency_s`: of the network. `idle_s`: how long
    the plane runs on after its last request, at least.
    """

    seed: int
    workers: int
    frontends: int
    slots: int
    places: int
    wait_s: float
    refusals: int
    itl_ms: float
    prefill_us: float
    odd_worker: bool
    turn_s_max: float
    latency_s: float
    buffer_bytes: int
    heartbeat_s: float
    drain_s: float
    records_max: int
    splits_ends: bool
    idle_s: float
    client_bytes_max: int = BYTES_ENOUGH
    requests: tuple[RequestPlan, ...] = field(default=())
    faults: tuple[Fault, ...] = field(default=())

    @property
    def is_tight(self) -> bool:
        """Whether workers may refuse requests for want of room."""
        return self.slots < SLOTS_ENOUGH or self.refusals > 0

    @property
    def has_keys(self) -> bool:
        """Whether clients need keys."""
        return any(request.tenant for request in self.requests)

    def without(self, *, request: int | None = None, fault: int | None = None) -> "Plan":
        """The plan without one of its requests, or of its faults, by index."""
        if request is not None:
            return replace(self, requests=self.requests[:request] + self.requests[request + 1 :])
        assert fault is not None
        return replace(self, faults=self.faults[:fault] + self.faults[fault + 1 :])
