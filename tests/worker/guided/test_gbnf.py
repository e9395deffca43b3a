"""GBNF: a grammar means to guided answers what it means to llama.cpp."""

import itertools
import random
import re
import time
from collections.abc import Iterator

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Guided, GuidedKind
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from services.worker.guided.gbnf import lark_of
from services.worker.guided.grammar import GrammarBuilder

LENGTH_MAX = 4
LETTERS = "ab"
SEEDS = range(60)
QUICK_S_MAX = 5.0
Tree = tuple[str, list["Tree"], str]
"""An expression: its kind, its parts, and a letter or a quantifier."""
TIMES = {"*": (0, 9), "+": (1, 9), "?": (0, 1), "{2}": (2, 2), "{1,}": (1, 9), "{0,2}": (0, 2), "{0}": (0, 0)}


@pytest.fixture(scope="module")
def grammars() -> GrammarBuilder:
    return GrammarBuilder(ByteTokenizer.token_bytes, [EOS])


def accepts(grammars: GrammarBuilder, text: str, answer: str) -> bool:
    try:
        return grammars.build(Guided(GuidedKind.GRAMMAR, (text,)), list(answer.encode())).is_complete
    except Failure as failure:
        if failure.reason is not Reason.GRAMMAR_REPLAY_MISMATCH:
            raise
        return False


MEANINGS = [
    ("root ::= ([0-9]+)?", ["", "4", "42"], ["a"]),
    ('root ::= ("a"+)*', ["", "aaa"], ["b"]),
    ('root ::= ("ab"?)+', ["", "ab", "abab"], ["a"]),
    ("root ::= ([0-9]+){2}", ["12", "123"], ["1"]),
    ('root ::= ((item)+)?\nitem ::= "x" "y"', ["", "xyxy"], ["x"]),
    ('root ::= ("a"{1,1000}){1,1000}', ["a", "aaa"], [""]),
    ('root ::= (""*)*', [""], ["a"]),
    ('root ::= "a"{0}"b"', ["b"], ["ab", "aab"]),
    ('root ::= "a"{0,0} "b"{0,} "c" { 1 , 2 }', ["c", "bbcc"], ["ac", "ccc"]),
    ('root ::= "ab"*', ["", "abab"], ["abb", "a"]),
    ('root ::= "a"?{2}+', ["", "aaa"], ["b"]),
    ('root ::= Foo foo\nFoo ::= "a"\nfoo ::= "b"', ["ab"], ["aa", "bb"]),
    ('root ::= A-B A_B start\nA-B ::= "1"\nA_B ::= "2"\nstart ::= "3"', ["123"], ["113"]),
    ('root ::= fooBar foo-bar r1 R1\nfooBar ::= "1"\nfoo-bar ::= "2"\nr1 ::= "3"\nR1 ::= "4"', ["1234"], ["1133"]),
    ('root ::= ab "b"\nab ::= "a" "b"*', ["ab", "abb"], ["a"]),
    ('root ::= "(" root ")" | ab "b"\nab ::= "a" "b"*', ["ab", "(abb)"], ["(a)"]),
    ('root ::= "a" "bc" | "ab" "d" | "x" root', ["abc", "abd", "xabc"], ["ab"]),
    ('# c ( "\nroot ::= ( # c )\n "a" # c "\r\n | "b"\n) |\n "c"\n\nx ::= x # unused\n', ["a", "b", "c"], [""]),
    (
        r'root ::= "\x41\u00e9\U0001F600\t\"\\\[" [\x2d\]\[^] [^^a-c\n] [a-]',
        ['Aé😀\t"\\[]d-', 'Aé😀\t"\\[^da'],
        ['Aé😀\t"\\[]aa'],
    ),
    ("root ::= . [^a] [-/]", ["\n\n/", "éb-"], ["xa-"]),
    ('root ::= "a" |', ["", "a"], ["b"]),
    ("root ::=", [""], ["b"]),
    ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
    ("root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(400)) + '\nr400 ::= "a"', ["a"], ["b"]),
]


@pytest.mark.parametrize(("text", "fitting", "other"), MEANINGS)
def test_grammar_accepts_the_answers_of_llama_cpp(
    grammars: GrammarBuilder, text: str, fitting: list[str], other: list[str]
) -> None:
    assert [answer for answer in fitting + other if accepts(grammars, text, answer)] == fitting


@pytest.mark.parametrize("seed", SEEDS)
def test_random_grammar_accepts_what_a_naive_matcher_accepts(grammars: GrammarBuilder, seed: int) -> None:
    dice = random.Random(seed)
    rules = {name: random_tree(dice, 3) for name in ("root", "Ab", "ab")}
    text = "\n".join(f"{name} ::= {written(tree)}" for name, tree in rules.items())
    answers = [
        "".join(letters) for length in range(LENGTH_MAX + 1) for letters in itertools.product(LETTERS, repeat=length)
    ]
    expected = language(rules)["root"]

    if expected:
        assert {answer for answer in answers if accepts(grammars, text, answer)} == expected, text


def random_tree(dice: random.Random, depth: int) -> Tree:
    kind = dice.choice(["letter", "rule", "sequence", "choice", "times"] if depth else ["letter"])
    match kind:
        case "letter":
            return kind, [], dice.choice(["a", "b", "ab", ""])
        case "rule":
            return kind, [], dice.choice(["Ab", "ab", "ab", "root"])
        case "times":
            return kind, [random_tree(dice, depth - 1)], dice.choice(list(TIMES))
    return kind, [random_tree(dice, depth - 1) for _ in range(2)], ""


def written(tree: Tree) -> str:
    kind, parts, word = tree
    match kind:
        case "letter":
            return f'"{word}"'
        case "rule":
            return word
        case "times":
            return f"({written(parts[0])}){word}"
    return "(" + (" " if kind == "sequence" else " | ").join(map(written, parts)) + ")"


def language(rules: dict[str, Tree]) -> dict[str, set[str]]:
    """The answers of each rule up to LENGTH_MAX: grown from nothing until no answer is new."""
    found: dict[str, set[str]] = {name: set() for name in rules}
    while (grown := {name: answers_of(tree, found) for name, tree in rules.items()}) != found:
        found = grown
    return found


def answers_of(tree: Tree, found: dict[str, set[str]]) -> set[str]:
    kind, parts, word = tree
    match kind:
        case "letter":
            return {word}
        case "rule":
            return found[word]
        case "choice":
            return answers_of(parts[0], found) | answers_of(parts[1], found)
        case "sequence":
            return joined(answers_of(parts[0], found), answers_of(parts[1], found))
    least, most = TIMES[word]
    one = answers_of(parts[0], found)
    powers = list(itertools.islice(powers_of(one), most + 1))
    return set().union(*powers[least:])


def powers_of(one: set[str]) -> Iterator[set[str]]:
    power = {""}
    while True:
        yield power
        power = joined(power, one)


def joined(first: set[str], second: set[str]) -> set[str]:
    return {a + b for a in first for b in second if len(a + b) <= LENGTH_MAX}


REFUSED = [
    ('root ::= "a"\n| "b"', "a rule begins with its name (line 2, at '| \"b\"')"),
    ("root ::= <think>", "tokens of the model are not supported"),
    ('root ::= "a"{3,2}', "its first number is greater than its second"),
    ('root ::= "a"{,2}', "a quantifier in braces is {m}, {m,} or {m,n}"),
    ("root ::= []", "the class is empty"),
    ("root ::= [z-a]", "the range is reversed"),
    (r'root ::= "\q"', "is no escape of GBNF"),
    (r'root ::= "\ud800"', "is no character"),
    (r'root ::= "\U00110000"', "is no character"),
    ('root ::= "a" )', "no parenthesis is open"),
    ('root ::= ("a"', "the parenthesis is not closed"),
    ('root = "a"', "'=' means nothing here"),
    ("root\n::= root", "a rule begins with name ::="),
    ("root ::= *", "nothing comes before the quantifier"),
    ("root ::= a ::= b", "a rule begins on a line of its own"),
    ("root ::= a", "it uses the rule 'a', but does not define it"),
    ('Root ::= "a"', "it has no rule root"),
    ("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000, "parentheses are nested too deeply"),
    ("root ::= " + "[" * 65_536, "the class is not closed"),
    ("root ::= " + '"' * 65_535, "the literal is not closed"),
    ("root ::= " + "{" * 65_535, "a quantifier in braces"),
]


@pytest.mark.parametrize(("text", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_invalid_grammar_is_refused_at_once_with_a_reason(text: str, why: str) -> None:
    start = time.process_time()

    with pytest.raises(ValueError, match=re.escape(why)):
        lark_of(text)

    assert time.process_time() - start < QUICK_S_MAX
