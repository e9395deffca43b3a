"""Draws the plan of a seed.

Each run has few features of the product, few kinds of faults and few values ("swarm testing"), so that those it has
meet often. Most faults strike at a moment: just after an event that the plane has to handle (`moments.py`).
"""

import random
from dataclasses import replace
from typing import get_args

from simulation.scenario.moments import FAULT_MOMENT, MOMENTS
from simulation.scenario.plan import (
    BYTES_ENOUGH,
    ELSEWHERE,
    FAULT_KINDS,
    HERE,
    RECORDS_ENOUGH,
    SLOTS_ENOUGH,
    TENANTS,
    THERE,
    WIRES,
    Fault,
    FaultKind,
    Plan,
    Reader,
    RequestPlan,
)

STOP_STRINGS = ("e ", "a", "in", "é", "語", "🎉", "tho")
FEATURES = (
    "keeps",
    "drops",
    "rivals",
    "choices",
    "prompts",
    "stops",
    "logprobs",
    "deadlines",
    "whole answers",
    "limits",
    "readers",
    "long prompts",
)
LONG_PROMPT = 5000
CROWD_ODDS = 0.04
"""How many runs have requests of several choices that a worker refuses."""
SLOW_ODDS = 0.08
"""How many runs have clients that are too slow for their answers."""
BYTES_FEW = (3 * 1024, 32 * 1024)
TENANTS_ODDS = 0.12
"""How many runs have two tenants with keys."""
LEASES_LAPSE_S = 15.0
LAPSE_ODDS = 0.15
"""How many runs go on until the leases of workers that were killed have lapsed."""
ON_WAYS: tuple[FaultKind, ...] = ("partition", "one_way", "latency")
LASTING: tuple[FaultKind, ...] = ("partition", "one_way", "freeze", "freeze_registry")
ON_REGISTRY: tuple[FaultKind, ...] = ("vanish_registry", "freeze_registry")
CHAINS: tuple[tuple[tuple[str, FaultKind, str], ...], ...] = (
    (("tokens come", "drain", THERE),),
    (("tokens come", "kill", THERE),),
    (("tokens come", "partition", THERE),),
    (("tokens come", "one_way", THERE),),
    (("tokens come", "freeze", THERE),),
    (("tokens come", "freeze", HERE),),
    (("an engine has begun", "kill", THERE), ("an engine has begun", "kill", THERE)),
    (("a request is sent to a worker", "kill", THERE), ("an engine has begun", "kill", THERE)),
    (("tokens come", "kill", THERE), ("a stream moves", "kill", ELSEWHERE)),
    (("tokens come", "drain", THERE), ("a second attempt has a worker", "kill", ELSEWHERE)),
    (("tokens come", "drain", THERE), ("a second attempt has a worker", "drain", ELSEWHERE)),
    (("tokens come", "drain", THERE), ("a second attempt begins", "freeze", HERE)),
    (
        ("tokens come", "drain", THERE),
        ("a second attempt begins", "freeze", HERE),
        ("a second attempt begins", "kill", THERE),
    ),
    (
        ("tokens come", "drain", THERE),
        ("a second attempt has a worker", "one_way", ELSEWHERE),
        ("a second attempt begins", "kill", THERE),
    ),
    (("tokens come", "drain", THERE), ("a second attempt takes over", "drain", THERE)),
    (("tokens come", "partition", THERE), ("a stream moves", "drain", ELSEWHERE)),
    (("tokens come", "kill", HERE), (FAULT_MOMENT, "freeze_registry", "registry")),
    (("tokens come", "kill", HERE), ("an answer is adopted", "kill", THERE)),
    (("tokens come", "partition", THERE), ("a stream moves", "kill", HERE)),
    (("a stream is let go of", "kill", THERE), ("an answer is looked for", "freeze", HERE)),
)
"""Faults that strike what the plane does about the one before: moment, kind, target."""


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    chance = random.Random(f"{seed}/crowd")
    plan = _crowded(chance, _draw(seed)) if chance.random() < CROWD_ODDS else _draw(seed)
    chance = random.Random(f"{seed}/tenants")
    return _shared(chance, plan) if chance.random() < TENANTS_ODDS else plan


def _shared(chance: random.Random, plan: Plan) -> Plan:
    """Each request is of one of two tenants. A rival may be of the other one, and has no right to the answer then."""
    tenants = {request.number: chance.choice(TENANTS) for request in plan.requests}
    requests = [
        replace(
            request,
            tenant=tenants[request.number],
            is_foreign=request.rival_of is not None and tenants[request.rival_of] != tenants[request.number],
        )
        for request in plan.requests
    ]
    return replace(plan, requests=tuple(requests))


def _crowded(chance: random.Random, plan: Plan) -> Plan:
    """Requests of several choices for workers of which others fill one, which then is lost while it refuses them."""
    plan = replace(
        plan, workers=max(2, plan.workers), slots=2, places=1, refusals=0, odd_worker=False, splits_ends=True
    )
    plan = replace(plan, client_bytes_max=BYTES_ENOUGH)  # Its clients are not slow, though they have much to read.
    requests = [
        replace(request, n=3, reader="normal", rival_of=None, prompts=request.prompts[:1], is_streamed=True)
        for request in plan.requests[:2]
    ]
    filled = Fault(at_s=0.0, kind="fill", target=THERE, duration_s=4.0, moment="a worker is found")
    lost = Fault(at_s=chance.choice([0.0, 0.05, 0.2]), kind="kill", target=THERE, moment="a worker refuses")
    return replace(plan, requests=tuple(requests), faults=(filled, lost))


def _draw(seed: int) -> Plan:
    chance = random.Random(f"{seed}/plan")
    is_tight = chance.random() < 0.35
    features = frozenset(one for one in FEATURES if chance.random() < (0.6 if one == "keeps" else 0.45))
    plan = Plan(
        seed=seed,
        workers=chance.choice([1, 2, 2, 2, 3]),
        frontends=chance.choice([1, 2, 2]),
        slots=chance.choice([1, 2, 3]) if is_tight else SLOTS_ENOUGH,
        places=chance.choice([0, 1, 3]) if is_tight else SLOTS_ENOUGH,
        wait_s=chance.choice([0.05, 0.3, 60.0]),
        refusals=chance.choice([0, 0, 1, 2]) if is_tight else 0,
        itl_ms=chance.choice([5.0, 20.0, 50.0]),
        prefill_us=100.0 if "long prompts" in features else chance.choice([0.0, 0.0, 1000.0, 3000.0]),
        odd_worker=chance.random() < 0.07,
        turn_s_max=chance.choice([0.0, 0.000_05, 0.002]),
        latency_s=chance.choice([0.000_02, 0.000_5, 0.01]),
        buffer_bytes=chance.choice([2048, 16 * 1024, 256 * 1024]),
        heartbeat_s=0.25,
        drain_s=chance.choice([0.02, 0.3, 5.0, 5.0]),
        records_max=chance.choice([RECORDS_ENOUGH, RECORDS_ENOUGH, 2]),
        splits_ends=chance.random() < (0.5 if is_tight and "choices" in features else 0.1),
        idle_s=0.5,
    )
    if chance.random() < SLOW_ODDS:
        features -= {"keeps", "prompts", "deadlines"}
        plan = _narrowed(replace(plan, itl_ms=5.0, buffer_bytes=2048, slots=SLOTS_ENOUGH))
        requests = [_slow(chance, request) for request in _requests(chance, plan, features)[:2]]
    else:
        requests = _requests(chance, plan, features)
    plan = replace(plan, requests=tuple(requests))
    plan = replace(plan, faults=_faults(chance, plan))
    return replace(plan, idle_s=LEASES_LAPSE_S) if chance.random() < LAPSE_ODDS else plan


# Requests


def _requests(chance: random.Random, plan: Plan, features: frozenset[str]) -> list[RequestPlan]:
    span_s = chance.choice([0.0, 0.1, 1.0])
    lengths = chance.choice([(1, 4), (20,), (20, 40), (40,), (40,)])
    wires = chance.choice([*((one,) for one in WIRES), WIRES])
    count = chance.choice([1, 1, 2, 3, 5]) if plan.slots == SLOTS_ENOUGH else chance.choice([3, 5, 7])
    requests: list[RequestPlan] = []
    for number in range(count):
        request = RequestPlan(
            number=number,
            at_s=chance.random() * span_s,
            frontend=chance.randrange(plan.frontends),
            prompts=(_prompt(chance, features),),
            max_tokens=chance.choice(lengths),
            temperature=chance.choice([0.0, 0.75]),  # Exact in 32 bits, as it travels.
            seed=chance.randrange(1 << 31),
            wire=chance.choice(wires),
        )
        requests.append(_featured(chance, request, plan, features))
    kept = [request for request in requests if request.is_kept]
    if kept and "rivals" in features:
        requests += [_rival(chance, chance.choice(kept), count + number, plan) for number in range(2)]
    return requests


def _prompt(chance: random.Random, features: frozenset[str]) -> str:
    size = chance.choice([1, 6, 40])
    if "long prompts" in features and chance.random() < 0.3:
        size = LONG_PROMPT
    return "".join(chance.choices("abcdefghij klmnop", k=size))


def _featured(chance: random.Random, request: RequestPlan, plan: Plan, features: frozenset[str]) -> RequestPlan:
    """The request with some of the features of this run."""

    def has(feature: str, odds: float = 0.6) -> bool:
        return feature in features and chance.random() < odds

    if has("choices"):
        n_max = min(3, plan.slots + plan.places)  # More are refused as invalid.
        request = replace(request, n=chance.randint(1, n_max))
    if has("stops", 0.3):
        request = replace(request, stop=tuple(chance.sample(STOP_STRINGS, 2)))
    if has("logprobs"):
        request = replace(request, logprobs=chance.choice([0, 2]))
    if has("deadlines", 0.3):
        request = replace(request, deadline_s=chance.choice([0.05, 0.3, 1.0]))
    if has("limits", 0.25):
        request = replace(request, migration_limit=chance.choice([0, 1]))
    if has("keeps"):
        request = _kept(chance, request, features)
    elif has("readers"):
        request = _read_oddly(chance, request)
    if has("prompts") and request.wire != "grpc" and request.reader == "normal":
        prompts = tuple(_prompt(chance, frozenset()) for _ in range(chance.choice([2, 3, 6])))
        request = replace(request, prompts=prompts, max_tokens=min(request.max_tokens, 20))
    is_streamed = request.is_kept or request.reader != "normal" or request.wire == "grpc"
    return replace(request, is_streamed=is_streamed or not has("whole answers"))


def _kept(chance: random.Random, request: RequestPlan, features: frozenset[str]) -> RequestPlan:
    drops = chance.choice([1, 1, 2, 3]) if "drops" in features else 0
    return replace(
        request,
        is_kept=True,
        grace_s=chance.choice([0.1, 0.5, 5.0, 5.0]),
        away_s=chance.choice([0.0, 0.05, 0.3]),
        drops=tuple(sorted(chance.randrange(request.max_tokens + 1) for _ in range(drops))),
        reader=chance.choice(["normal", "normal", "cancels"]),
        after=chance.randrange(request.max_tokens + 1),
    )


def _read_oddly(chance: random.Random, request: RequestPlan) -> RequestPlan:
    readers = [one for one in get_args(Reader) if one != "normal"]
    reader: Reader = chance.choice([*readers, "leaves"])
    request = replace(request, reader=reader, after=chance.randrange(request.max_tokens + 1))
    if reader == "goes on":
        return replace(request, n=1)  # A client of one answer sends its tokens as `generated_token_ids`.
    return request


def _slow(chance: random.Random, request: RequestPlan) -> RequestPlan:
    """The request with an answer of many bytes, and a client that does not keep up."""
    return replace(
        request, reader="slow", is_streamed=True, max_tokens=400, n=chance.choice([1, 2]), logprobs=5, stop=()
    )


def _narrowed(plan: Plan) -> Plan:
    """The plan, perhaps with less room for what clients leave unread."""
    chance = random.Random(f"{plan.seed}/bounds")
    return replace(plan, client_bytes_max=chance.choice([BYTES_ENOUGH, *BYTES_FEW]))


def _rival(chance: random.Random, request: RequestPlan, number: int, plan: Plan) -> RequestPlan:
    """Another client that comes for the same answer."""
    lasts_s = request.max_tokens * plan.itl_ms * 1e-3
    return replace(
        request,
        number=number,
        rival_of=request.number,
        at_s=request.at_s + chance.random() * chance.choice([0.05, lasts_s]),
        frontend=chance.randrange(plan.frontends),
        wire="grpc" if request.wire == "grpc" else chance.choice(["http1", "http2"]),
        reader="normal",
        drops=(),
    )


# Faults


def _faults(chance: random.Random, plan: Plan) -> tuple[Fault, ...]:
    if chance.random() < 0.1:
        return ()
    kinds = chance.sample(FAULT_KINDS, chance.choice([1, 2, 3]))
    moments = chance.sample([*MOMENTS, FAULT_MOMENT], chance.choice([1, 2, 3]))
    faults = [_fault(chance, chance.choice(kinds), moments, plan) for _ in range(chance.choice([1, 2, 3, 4]))]
    if chance.random() < 0.75:
        faults = faults[:1] + _chain(chance, plan) if chance.random() < 0.3 else _chain(chance, plan)
    if all(fault.moment == FAULT_MOMENT for fault in faults):
        faults[0] = replace(faults[0], moment="", at_s=chance.random())
    return tuple(faults)


def _chain(chance: random.Random, plan: Plan) -> list[Fault]:
    """Faults that follow from each other."""
    faults: list[Fault] = []
    for moment, kind, target in chance.choice(CHAINS):
        former = [fault.nth for fault in faults if fault.moment == moment and fault.kind == kind]
        fault = _fault(chance, kind, [moment], plan)
        fault = replace(
            fault,
            at_s=chance.choice([0.0, 0.0001, plan.latency_s, plan.itl_ms * 0.5e-3]),
            moment=moment,
            nth=former[-1] + 1 if former else _early_or_late(chance, plan) if moment == "tokens come" else 1,
            target=target,
            other=HERE if kind in ON_WAYS else "",
        )
        if kind in LASTING and moment in ("tokens come", FAULT_MOMENT):
            fault = replace(fault, duration_s=chance.choice([0.3, 1.5, 1.5, 4.0]))
        faults.append(fault)
    return faults


def _early_or_late(chance: random.Random, plan: Plan) -> int:
    """Which of the tokens of a run: one of the first, or one of the last."""
    count = sum(request.max_tokens * request.choice_count for request in plan.requests)
    length = plan.requests[0].max_tokens
    return max(1, chance.choice([1, 2, 5, length - 3, length - 1, length // 2, chance.randint(1, min(count, 40))]))


def _soon_s(chance: random.Random, plan: Plan) -> float:
    """A while in which the plane handles what has just happened."""
    step_s = plan.itl_ms * 1e-3
    return chance.choice([0.0, 0.0001, plan.latency_s, 2 * plan.latency_s, step_s / 2, 1.5 * step_s, 5 * step_s, 0.5])


def _fault(chance: random.Random, kind: FaultKind, moments: list[str], plan: Plan) -> Fault:
    moment = chance.choice(moments) if chance.random() < 0.85 else ""
    target, other = _ends(chance, kind, plan, is_placed=moment not in ("", FAULT_MOMENT))
    short_s = plan.itl_ms * 1e-3
    fault = Fault(
        at_s=_soon_s(chance, plan) if moment else chance.random(),
        kind=kind,
        target=target,
        other=other,
        duration_s=chance.choice([short_s, 5 * short_s, 0.3, 1.5, 4.0]),
        moment=moment,
        nth=chance.choice([1, 1, 2, 3, 5, 20]) if moment == "tokens come" else chance.choice([1, 1, 1, 2, 3]),
    )
    return replace(fault, duration_s=0.0) if kind in ("kill", "drain", "vanish_registry", "lie") else fault


def _ends(chance: random.Random, kind: FaultKind, plan: Plan, *, is_placed: bool) -> tuple[str, str]:
    """The target of a fault and the other end. `is_placed`: the moment says where it happens."""
    workers = [THERE, THERE, ELSEWHERE] if is_placed else [f"worker-{number}" for number in range(plan.workers)]
    frontends = [HERE] if is_placed else [f"frontend-{number}" for number in range(plan.frontends)]
    if kind in ON_REGISTRY:
        return "registry", ""
    if kind in ("lie", "fill"):
        return chance.choice(workers), ""
    if kind in ON_WAYS:
        ends = [chance.choice(workers), chance.choice(frontends) if chance.random() < 0.8 else "registry"]
        chance.shuffle(ends)
        return ends[0], ends[1]
    return (chance.choice(workers) if chance.random() < 0.75 else chance.choice(frontends)), ""
