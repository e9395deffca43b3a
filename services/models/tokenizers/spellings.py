"""Finds the tokens that a text spells out, such as "<|im_end|>"."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise


def is_blank(name: str) -> bool:
    """Whether a token spells blanks alone, in either way that vocabularies write a space. It controls nothing."""
    return not name.strip(" \n\r\t▁")


class Spellings:
    """The spellings of some tokens. The cost of a search depends on their different lengths, not on their number."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._lengths = sorted({len(name) for name in ids}, reverse=True)
        seconds = {name[1:2] for name in ids}
        second = "" if "" in seconds else f"(?={one_of_characters(seconds).pattern})"
        self._begin = re.compile(one_of_characters({name[0] for name in ids}).pattern + second)

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Each token that the text spells: where it begins and ends, and its id. The first and longest one counts."""
        end = 0
        for match in self._begin.finditer(text):
            begin = match.start()
            if begin < end:
                continue
            for length in self._lengths:
                name = text[begin : begin + length]
                if name in self._ids:
                    end = begin + len(name)
                    yield begin, end, self._ids[name]
                    break

    def broken(self, text: str) -> list[str]:
        """The text in pieces, with a cut after the first character of each spelling, so that no piece has one."""
        cuts = [0, *(begin + 1 for begin, _, _ in self.find(text)), len(text)]
        return [text[begin:end] for begin, end in pairwise(cuts) if begin < end]


def one_of_characters(characters: set[str]) -> re.Pattern[str]:
    """A pattern for any of the characters, which matches nothing if there are none."""
    return re.compile(f"[{re.escape(''.join(sorted(characters)))}]" if characters else r"(?!)")
