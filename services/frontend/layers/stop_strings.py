"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string to be completed in a text that comes in pieces, and holds back what may become one.

    Each string is searched by Knuth, Morris and Pratt's algorithm: what a character costs does not grow with the
    strings' length, so that nobody can make it cost more than it is worth.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._searches = [_Search(string) for string in strings]
        self._firsts = {string[0] for string in strings}
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string has come: then it is what stood before it."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, False
        text, begin = self._held + text, len(self._held)
        for end in range(begin, len(text)):
            completed = [search.length for search in self._searches if search.take(text[end])]
            if completed:
                self._held = ""
                return text[: end + 1 - max(completed)], True
        held = max((search.matched for search in self._searches), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held


class _Search:
    """The search for one string: how much of it stands at the end of the text so far."""

    def __init__(self, string: str) -> None:
        self._string = string
        self._fallback = _fallback(string)
        self.length = len(string)
        self.matched = 0

    def take(self, character: str) -> bool:
        """One more character. Returns whether it completes the string."""
        matched = self.matched
        while matched and self._string[matched] != character:
            matched = self._fallback[matched - 1]
        self.matched = matched + (self._string[matched] == character)
        return self.matched == self.length


def _fallback(string: str) -> list[int]:
    """For each prefix the length of the longest other prefix that is its end."""
    fallback = [0] * len(string)
    length = 0
    for at in range(1, len(string)):
        while length and string[at] != string[length]:
            length = fallback[length - 1]
        length += string[at] == string[length]
        fallback[at] = length
    return fallback
