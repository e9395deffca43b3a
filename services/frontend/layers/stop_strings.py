"""Finds stop strings in a text that arrives in parts."""

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string that is completed, and holds back text that may be the start of one.

    Each string is matched with the Knuth–Morris–Pratt algorithm: the cost of a character does not grow with the length
    of the strings, so clients cannot make it arbitrarily expensive.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._matchers = [_Matcher(string) for string in strings]
        self._firsts = {string[0] for string in strings}
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add `text`. Returns the text that may be delivered now, and whether a stop string was completed; the text
        then ends before it."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, False
        text, begin = self._held + text, len(self._held)
        for end in range(begin, len(text)):
            completed = [matcher.length for matcher in self._matchers if matcher.feed(text[end])]
            if completed:
                self._held = ""
                return text[: end + 1 - max(completed)], True
        held = max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Matches one stop string. `matched`: how many of its characters the text so far ends with."""

    def __init__(self, string: str) -> None:
        self._string = string
        self._fallback = _fallback(string)
        self.length = len(string)
        self.matched = 0

    def feed(self, character: str) -> bool:
        """Add one character. Returns whether it completes the string."""
        matched = self.matched
        while matched and self._string[matched] != character:
            matched = self._fallback[matched - 1]
        self.matched = matched + (self._string[matched] == character)
        return self.matched == self.length


def _fallback(string: str) -> list[int]:
    """The failure function: for each prefix, the length of its longest proper prefix that is also its suffix."""
    fallback = [0] * len(string)
    length = 0
    for at in range(1, len(string)):
        while length and string[at] != string[length]:
            length = fallback[length - 1]
        length += string[at] == string[length]
        fallback[at] = length
    return fallback
