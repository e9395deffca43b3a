r"""Translates GBNF, the grammars of llama.cpp, to llguidance's dialect of Lark.

The text means what it means to llama.cpp: a line break ends a rule, unless it stands in parentheses or after `::=` or
`|`; of several rules with one name the last counts; a quantifier repeats the item before it, and a literal is one item.
All rules get new names, because Lark gives a meaning to the case of a name. Each pair of parentheses becomes a rule, so
the translation has none. The time is linear in the text.

A grammar without recursion becomes one lexeme: an automaton of llguidance's lexer. In any other grammar each character
is a lexeme. Longer lexemes would be faster, but the lexer matches the longest, and so excludes shorter matches. For
JSON and a vocabulary of 49,152 tokens, a mask takes 3 ms at the median, and 27 ms at most.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from services.core.errors import quoted

_Rule = list[list["_Item"]]
"""The items of each alternative."""

_TOKEN = re.compile(
    r"""(?P<space>(?:[\ \t]|\#[^\r\n]*+)++)
    |(?P<newline>[\r\n])
    |(?P<literal>"(?:[^"\\]|\\.)*+")
    |(?P<class>\[(?:[^\]\\]|\\.)*+\])
    |(?P<name>[\w-]++)
    |(?P<times>[*+?]|\{\s*+[0-9]{1,9}\s*+(?:,\s*+(?:[0-9]{1,9})?+\s*+)?+\})
    |(?P<mark>::=|[().|])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"""\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<escaped>[trn\\"\[\]]))|[^\\]""",
    re.DOTALL,
)
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n"}
_CODE_MAX = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_ANY = r"/[\x{0}-\x{10FFFF}]/"
_EXCERPT_CHARACTERS = 20
GROUP_DEPTH_MAX = 200
"""Parentheses in one another. llguidance crashes on a thousand that are repeated."""
LEXEME_DEPTH_MAX = 200
"""Rules in one another, in a lexeme. More become lexemes of one character."""
_WHY = {
    '"': "the literal is not closed",
    "[": "the class is not closed",
    "{": "a quantifier in braces is {m}, {m,} or {m,n}",
    "<": "tokens of the model are not supported",
    "!": "tokens of the model are not supported",
}


class _Item(NamedTuple):
    """`what`: terminals in Lark, or the number of a rule. `times`: a quantifier or nothing."""

    what: str | int
    times: str = ""


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


def lark_of(text: str) -> str:
    """The rules of a grammar in Lark. Raises ValueError with a reason for the client."""
    return _written(*_Reader(text).read())


class _Reader:
    """Reads the rules of a grammar. Groups become rules as well."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._numbers: dict[str, int] = {}
        self._rules: dict[int, _Rule] = {}
        self._count = 0
        self._groups: list[tuple[int, _Rule, int]] = []
        """The rules around the current one, each with the start of the parenthesis that left it."""

    def read(self) -> tuple[Mapping[int, _Rule], int]:
        """The rules, and the number of the rule `root`."""
        self._read_rules(list(self._tokens()))
        for name, number in self._numbers.items():
            if number not in self._rules:
                raise ValueError(f"it uses the rule {quoted(name)}, but does not define it")
        if "root" not in self._numbers:
            raise ValueError("it has no rule root, with which an answer begins")
        return self._rules, self._numbers["root"]

    def _tokens(self) -> Iterator[_Token]:
        """All but white space, comments, and line breaks that end no rule. Ends with such a line break."""
        depth, position, last = 0, 0, "\n"
        while position < len(self._text):
            found = _TOKEN.match(self._text, position)
            if found is None:
                character = self._text[position]
                raise self._error(_WHY.get(character, f"{quoted(character)} means nothing here"), position)
            kind, text = found.lastgroup or "", found[0]
            if kind == "mark":
                depth += (text == "(") - (text == ")")
            if kind != "space" and not (kind == "newline" and (depth > 0 or last in ("\n", "::=", "|"))):
                last = "\n" if kind == "newline" else text
                yield _Token(kind, text, position)
            position = found.end()
        yield _Token("newline", "\n", position)

    def _read_rules(self, tokens: Sequence[_Token]) -> None:
        number = -1
        rule: _Rule | None = None
        expected = "name"
        for token in tokens:
            if rule is not None:
                number, rule = self._read_item(token, number, rule)
            elif expected == "name" and token.kind == "name":
                number, expected = self._number_of(token.text), "::="
            elif expected == "::=" and token.text == "::=":
                rule, expected = [[]], "name"
            elif token.kind != "newline" or expected == "::=":
                raise self._error(f"a rule begins with {'its name' if expected == 'name' else 'name ::='}", token.start)

    def _read_item(self, token: _Token, number: int, rule: _Rule) -> tuple[int, _Rule | None]:
        """Add a token to a rule. Returns the current rule after it; None: it has ended."""
        match token.kind, token.text:
            case "newline", _:
                if self._groups:
                    raise self._error("the parenthesis is not closed", self._groups[-1][2])
                self._rules[number] = rule
                return number, None
            case _, "|":
                rule.append([])
            case _, "(":
                if len(self._groups) == GROUP_DEPTH_MAX:
                    raise self._error(f"parentheses are nested too deeply, at most {GROUP_DEPTH_MAX}", token.start)
                self._groups.append((number, rule, token.start))
                self._count += 1
                return self._count, [[]]
            case _, ")":
                if not self._groups:
                    raise self._error("no parenthesis is open", token.start)
                item = self._group_of(number, rule)
                number, rule, _ = self._groups.pop()
                rule[-1].append(item)
            case _, "::=":
                raise self._error("a rule begins on a line of its own", token.start)
            case "times", _:
                self._repeat(token, rule[-1])
            case _:
                rule[-1].append(self._item_of(token))
        return number, rule

    def _group_of(self, number: int, rule: _Rule) -> _Item:
        """A group as one item."""
        if len(rule) == len(rule[0]) == 1:
            return rule[0][0]
        self._rules[number] = rule
        return _Item(number)

    def _number_of(self, name: str) -> int:
        if name not in self._numbers:
            self._count += 1
            self._numbers[name] = self._count
        return self._numbers[name]

    def _item_of(self, token: _Token) -> _Item:
        match token.kind:
            case "name":
                return _Item(self._number_of(token.text))
            case "literal":
                codes = self._codes(token.start + 1, token.start + len(token.text) - 1)
                return _Item(" ".join(json.dumps(chr(code), ensure_ascii=False) for code, _ in codes) or '""')
            case "class":
                return _Item(self._class_of(token))
        return _Item(_ANY)

    def _class_of(self, token: _Token) -> str:
        start, end = token.start + 1, token.start + len(token.text) - 1
        is_negated = self._text.startswith("^", start)
        codes = list(self._codes(start + is_negated, end))
        if not codes:
            raise self._error("the class is empty", token.start)
        ranges, position = [], 0
        while position < len(codes):
            first = last = codes[position][0]
            position += 1
            if position + 1 < len(codes) and codes[position][1] == "-":
                last = codes[position + 1][0]
                position += 2
            if last < first:
                raise self._error("the range is reversed", token.start)
            ranges.append(f"\\x{{{first:x}}}-\\x{{{last:x}}}")
        return f"/[{'^' * is_negated}{''.join(ranges)}]/"

    def _codes(self, position: int, end: int) -> Iterator[tuple[int, str]]:
        """The code points of a literal or a class, and how each is written."""
        while position < end:
            found = _CHARACTER.match(self._text, position)
            if found is None:
                raise self._error(f"{quoted(self._text[position : position + 2])} is no escape of GBNF", position)
            yield self._code_of(found), found[0]
            position = found.end()

    def _code_of(self, found: re.Match[str]) -> int:
        if escaped := found["escaped"]:
            return ord(_ESCAPED.get(escaped, escaped))
        number = found["x"] or found["u"] or found["U"]
        code = int(number, 16) if number else ord(found[0])
        if code > _CODE_MAX or code in _SURROGATES:
            raise self._error(f"{quoted(found[0])} is no character", found.start())
        return code

    def _repeat(self, token: _Token, items: list[_Item]) -> None:
        """Repeat the last item."""
        if not items:
            raise self._error("nothing comes before the quantifier", token.start)
        what, times = items.pop()
        if times:
            self._count += 1
            self._rules[self._count] = [[_Item(what, times)]]
            what = self._count
        counts = [int(number) for number in re.findall("[0-9]+", token.text)]
        if len(counts) == 2 and counts[0] > counts[1]:
            raise self._error("its first number is greater than its second", token.start)
        if counts and counts[-1] == 0 and not ("," in token.text and len(counts) == 1):
            items.append(_Item('""'))
        else:
            items.append(_Item(what, "".join(token.text.split())))

    def _error(self, why: str, position: int) -> ValueError:
        line = self._text.count("\n", 0, position) + 1
        excerpt = self._text[position : position + _EXCERPT_CHARACTERS]
        where = f"line {line}, at {quoted(excerpt)}" if excerpt else "its end"
        return ValueError(f"{why} ({where})")


def _written(rules: Mapping[int, _Rule], root: int) -> str:
    """The rules that the root uses, in Lark. Names in capitals are parts of lexemes."""
    depths = _depths(rules, root)
    is_lexeme = depths is not None and depths[root] <= LEXEME_DEPTH_MAX
    letter = "R" if is_lexeme else "r"

    def written(item: _Item) -> str:
        what = item.what if isinstance(item.what, str) else f"{letter}{item.what}"
        return f"({what}){item.times}" if item.times else what

    lines = [f"start: {letter}{root}"]
    for number in rules if depths is None else depths:
        alternatives = (" ".join(map(written, items)) or '""' for items in rules[number])
        lines.append(f"{letter}{number}: {' | '.join(alternatives)}")
    return "\n".join(lines)


def _depths(rules: Mapping[int, _Rule], root: int) -> dict[int, int] | None:
    """For each rule that the root uses: how many rules contain one another from there on. None: one contains itself."""
    depths: dict[int, int] = {}
    entered: set[int] = set()
    ahead = [root]
    while ahead:
        number = ahead[-1]
        if number in depths:
            ahead.pop()
            continue
        used = [item.what for items in rules[number] for item in items if isinstance(item.what, int)]
        if number in entered:
            depths[number] = 1 + max((depths[one] for one in used), default=0)
            continue
        entered.add(number)
        if any(one in entered and one not in depths for one in used):
            return None
        ahead += used
    return depths
