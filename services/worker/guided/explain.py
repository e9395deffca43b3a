"""Says in words for clients why llguidance refuses a guided field. Its own messages quote a text that nobody sent."""

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
