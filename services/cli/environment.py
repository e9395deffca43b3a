"""Variables that begin as ours do: misspelt ones are an error, and those of other programs are ignored with a log line.

The prefix is not ours alone. NVIDIA Dynamo has hundreds of such variables, and Kubernetes makes some up for every
service whose name begins with `dyn`: `DYN_FRONTEND_SERVICE_HOST`, `DYN_FRONTEND_PORT=tcp://10.0.0.1:8000`.
"""

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog

from services.runtime.log import configure_logging, log_config

log = structlog.get_logger()

PREFIX = "DYN_"
SIMILARITY_MIN = 0.7
"""How similar a variable must be, without the prefix, to be suggested for an unknown one. 1: equal."""
WORD_SIMILARITY_MIN = 0.75
"""How similar a word must be to another to be a misspelling of it: LIMITS is one of LIMIT, HOST is none of PORT."""
NAMES_LOGGED_MAX = 20
_LINK = re.compile(r"(tcp|udp|sctp)://\S+")
_LINK_NAME = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_OF_LIBRARIES = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
"""Variables for other programs that would make a library keep our metrics in files."""


@dataclass(frozen=True)
class Ignored:
    """Names of variables that are ignored.

    links: service links of Kubernetes. mistaken: links in variables that belong to an option. unknown: other variables
    with our prefix, mapped to a similar variable of ours or "".
    """

    links: Collection[str]
    mistaken: Collection[str]
    unknown: Mapping[str, str]


_ignored = Ignored((), (), {})


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes makes up such a variable for a service, or Docker for a linked container."""
    return _LINK_NAME.fullmatch(name) is not None or (name.endswith("_PORT") and _LINK.fullmatch(value) is not None)


def misspelling_of(name: str, known: Collection[str]) -> str | None:
    """The known variable that `name` is certainly meant to be, or None.

    It must have the same words, each spelt alike. A variable of another program has other words.
    """
    candidates = [one for one in known if _has_words_of(name, one)]
    return max(sorted(candidates), key=lambda one: _similarity(name, one), default=None)


def _has_words_of(name: str, one: str) -> bool:
    if name.replace("_", "") == one.replace("_", ""):
        return True
    words, others = name.split("_"), one.split("_")
    pairs = zip(words, others, strict=False)
    return len(words) == len(others) and all(_similarity(*pair) >= WORD_SIMILARITY_MIN for pair in pairs)


def _similarity(text: str, other: str) -> float:
    return 1.0 if text == other else difflib.SequenceMatcher(None, text, other).ratio()


def similar_to(name: str, known: Collection[str]) -> str:
    """The known variable that is most similar to `name`, or ""."""
    rests = [one.removeprefix(PREFIX) for one in known]
    found = difflib.get_close_matches(name.removeprefix(PREFIX), rests, n=1, cutoff=SIMILARITY_MIN)
    return PREFIX + found[0] if found else ""


def check_variables(environment: MutableMapping[str, str], known: Collection[str]) -> Ignored:
    """Remove variables of other programs, so that neither options nor child processes read them. Returns their names.

    Raises SystemExit for a misspelt variable: it must not be ignored silently.
    """
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    links = [name for name, value in ours.items() if is_service_link(name, value)]
    mistaken = [name for name in links if name in known and _LINK.fullmatch(ours[name])]
    others = [name for name in sorted(ours) if name not in known and name not in links]
    misspelt = {name: meant for name in others if (meant := misspelling_of(name, known))}
    if misspelt:
        raise SystemExit(f"error: no option reads {', '.join(misspelt)}: did you mean {', '.join(misspelt.values())}?")
    ignored = Ignored(
        links=sorted(name for name in links if name not in known),
        mistaken=sorted(mistaken),
        unknown={name: similar_to(name, known) for name in others},
    )
    for name in (*ignored.links, *ignored.mistaken, *ignored.unknown):
        environment.pop(name, None)
    return ignored


def check_environment(known: Callable[[], Collection[str]]) -> None:
    """Check the variables of this process. What is ignored is logged by `start_logging`.

    `known`: returns the variables of all options; only called if needed, because it imports all commands.
    """
    global _ignored
    for name in _OF_LIBRARIES:
        os.environ.pop(name, None)
    if any(name.startswith(PREFIX) for name in os.environ):
        _ignored = check_variables(os.environ, known())


def start_logging(process: str, given: Mapping[str, Any], config: object = None) -> None:
    """Configure the log of this process, and log its configuration, if given, and which variables are ignored.

    `given`: the parameters of `logging_options`.
    """
    configure_logging(process, level=given["log_level"], log_format=given["log_format"])
    if config is not None:
        log_config(config)
    if _ignored.links:
        log.info("service links ignored", variables=_listed(_ignored.links))
    if _ignored.mistaken:
        log.warning(
            "service links ignored in variables of options",
            variables=_listed(_ignored.mistaken),
            hint="Kubernetes sets them for a service of that name: use enableServiceLinks: false, or set them yourself",
        )
    if _ignored.unknown:
        similar = dict.fromkeys(filter(None, _ignored.unknown.values()))
        hint = {"did_you_mean": _listed(similar)} if similar else {}
        log.warning("variables ignored that no option reads", variables=_listed(_ignored.unknown), **hint)


def _listed(names: Collection[str]) -> str:
    more = len(names) - NAMES_LOGGED_MAX
    return ", ".join([*list(names)[:NAMES_LOGGED_MAX], *([f"and {more} more"] if more > 0 else [])])
