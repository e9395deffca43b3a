"""Finds stop strings in a text that arrives in parts."""

from collections.abc import Sequence
from itertools import compress


class StopStrings:
    """Finds the first stop string that is completed, and holds back text that may be the start of one.

    The text that is searched also has parts that are not shown: the spellings of special tokens.

    Each string is matched with the Knuth–Morris–Pratt algorithm: the cost of a character does not grow with the length
    of the strings, so clients cannot make it arbitrarily expensive.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._matchers = [_Matcher(string) for string in strings]
        self._firsts = {string[0] for string in strings}
        self._held = ""
        self._held_is_shown = bytearray()  # For each character of `_held`, 1 or 0.

    def feed(self, text: str, *, is_shown: bool = True, may_stop: bool = True) -> tuple[str, bool]:
        """Add `text`. Returns the text that may be delivered now, and whether a stop string was completed; the text
        then ends before it.

        `may_stop`: whether this text may complete a string. If not, it may still begin one.
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text if is_shown else "", False
        begin = len(self._held)
        self._held += text
        self._held_is_shown += (b"\1" if is_shown else b"\0") * len(text)
        for end in range(begin, len(self._held)):
            completed = self._completed(self._held[end])
            if completed and may_stop:
                shown = self._release(end + 1 - max(completed))
                self._held = ""
                self._held_is_shown.clear()
                return shown, True
        kept = max((matcher.matched for matcher in self._matchers), default=0)
        return self._release(len(self._held) - kept), False

    def _completed(self, character: str) -> list[int]:
        """The lengths of the strings that the next character completes."""
        begun = [matcher for matcher in self._matchers if matcher.matched or matcher.first == character]
        return [matcher.length for matcher in begun if matcher.feed(character)]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return self._release(len(self._held))

    def _release(self, size: int) -> str:
        """Remove this many characters from the text held back. Returns those to show."""
        shown = "".join(compress(self._held[:size], self._held_is_shown))
        self._held = self._held[size:]
        del self._held_is_shown[:size]
        return shown


class _Matcher:
    """Matches one stop string.

    `matched`: how many of its characters the text so far ends with; of a string that is complete, how many of the next
    one may have begun within it.
    """

    def __init__(self, string: str) -> None:
        self._string = string
        self._fallback = _fallback(string)
        self.first = string[0]
        self.length = len(string)
        self.matched = 0

    def feed(self, character: str) -> bool:
        """Add one character. Returns whether it completes the string."""
        matched = self.matched
        while matched and self._string[matched] != character:
            matched = self._fallback[matched - 1]
        matched += self._string[matched] == character
        is_complete = matched == self.length
        self.matched = self._fallback[-1] if is_complete else matched
        return is_complete


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
