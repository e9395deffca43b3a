"""Says in words for clients why a library refuses a guided field.

llguidance's own messages quote a text that nobody sent. Those of other libraries have paths and tracebacks.
"""

import re

_EXCERPT = re.compile(r"\n *\d+ \| .*", re.DOTALL)
"""Lines of the translation, with which a message ends."""
_PREFIX = re.compile(r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?")
_NO_ANSWER = "no answer can match it"
_TOO_LARGE = "it is too large to compile: shorten it, or lower its counts of repetitions"
_KNOWN = (
    (
        r"NoExtensionBias",
        f"{_NO_ANSWER}: look for a rule or schema that never ends, or a class that excludes everything",
    ),
    (r"Unsatisfiable schema: (.*)", rf"{_NO_ANSWER}: \1"),
    (r"oneOf constraints are not supported.*", "oneOf is only supported if its schemas exclude one another: use anyOf"),
    (r"Unimplemented keys: \[(.*)\]", r"these keywords are not supported: \1; leave them out"),
    (r"Unknown format: (.*)", r"the format \1 is not supported: use pattern, or leave it out"),
    (r"Resource '(.*)' is not present.*", r"the schema \1 is not part of it: move it to $defs"),
    (r".*regex parse error:.*\nerror: (.*)", r"the expression is invalid: \1"),
    (r".*lookarounds? not supported.*", "look-around and the boundaries of words and lines are not supported"),
    (r".*(?:too big|too large|too many|fuel|limit).*", _TOO_LARGE),
)
"""What llguidance says, and what a client reads instead. The first that fits counts."""
ERROR_CHARACTERS_MAX = 300
_READ_CHARACTERS_MAX = 8192
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):.*?\n(?=\S)", re.DOTALL)
"""A traceback of Python up to its last line, which is the message."""
_INSIDES = (
    re.compile(r"(?:Stack trace|stack backtrace|Traceback \(most|File \"|note: run with `RUST_BACKTRACE).*", re.DOTALL),
    re.compile(r"(?:\[[\d:]+\] )?(?<![\w.~/-])(?:[\w.~-]*+/)+[\w.-]+\.(?:cc|cpp|cu|h|hpp|py|pyx|rs|so)\b(?::\d+)*:? ?"),
)
"""Other tracebacks, which end a message, and paths of source files with the time before them."""
_OWN_SYNTAX = re.compile(r"%llguidance|x-guidance|%json|<non-verbose/>|no_forcing")


def explained(message: str) -> str:
    """A message of llguidance as a sentence for the client."""
    text = _PREFIX.sub("", _EXCERPT.sub("", message)).strip()
    for said, sentence in _KNOWN:
        if found := re.match(said, text, re.DOTALL):
            return found.expand(sentence).strip()
    if _OWN_SYNTAX.search(text):
        return "it cannot be compiled: simplify it"
    return " ".join(text.split())


def failing(error: BaseException, library: str = "its library") -> str:
    """What a client reads about an exception of a library: our sentence, and the library's text without its insides."""
    text = _TRACEBACK.sub("", str(error)[:_READ_CHARACTERS_MAX])
    for inside in _INSIDES:
        text = inside.sub("", text)
    text = explained(text)[:ERROR_CHARACTERS_MAX]
    return f"{library} cannot compile it, and says: {text}" if text else f"{library} cannot compile it"
