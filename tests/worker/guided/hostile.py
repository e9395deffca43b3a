"""Texts that crash, run or allocate without end in the libraries that compile them, found by trying."""

import json
from dataclasses import dataclass

from services.core.request import Guided, GuidedKind


@dataclass(frozen=True)
class Late:
    """A text that is hostile only after some tokens."""

    guided: Guided
    tokens: bytes


def schema(value: object) -> Guided:
    return Guided(GuidedKind.JSON_SCHEMA, (json.dumps(value),))


def chain(length: int) -> str:
    """A grammar of rules that each refer to the next: converting it takes time in the square of its length."""
    rules = [f'r{number} ::= r{number + 1} "b"' for number in range(length)]
    return "\n".join(["root ::= r0", *rules, f'r{length} ::= "a"'])


HOSTILE = {
    "a multiple of a large number": schema({"type": "integer", "multipleOf": 9_999_991}),
    "many optional letters": Guided(GuidedKind.REGEX, ("a?" * 20_000 + "a" * 20_000,)),
    "many repeated classes": Guided(GuidedKind.REGEX, ("[ab]*" * 10_000,)),
    "many equal choices": Guided(GuidedKind.CHOICE, ("a",) * 60_000),
    "a grammar of many repeated classes": Guided(GuidedKind.GRAMMAR, ("root ::= " + " ".join(["[a-z]*"] * 9_000),)),
    "a grammar that doubles": Guided(
        GuidedKind.GRAMMAR,
        ("\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(100)), 'r100 ::= "a"']),),
    ),
    "a chain of rules": Guided(GuidedKind.GRAMMAR, (chain(2_800),)),
    "brackets in brackets": Guided(GuidedKind.GRAMMAR, ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,)),
    "groups in groups": Guided(GuidedKind.REGEX, ("(" * 30_000 + "a" + ")" * 30_000,)),
    "schemas in schemas": Guided(GuidedKind.JSON_SCHEMA, ('{"allOf":[' * 5_000 + "{}" + "]}" * 5_000,)),
    "a schema that refers to itself": schema({"allOf": [{"$ref": "#"}]}),
    "a number with many digits": Guided(GuidedKind.JSON_SCHEMA, ('{"type":"integer","maximum":' + "9" * 60_000 + "}",)),
    "a number that is none": Guided(GuidedKind.JSON_SCHEMA, ('{"type":"integer","maximum":NaN}',)),
    "a key given twice": Guided(GuidedKind.JSON_SCHEMA, ('{"type":"object","type":"string"}',)),
}
"""Each is refused with INVALID_ARGUMENT, if a compilation may take HOSTILE_CPU_S."""
HOSTILE_CPU_S = 0.3
"""Processor time. Those that are not refused by themselves take 1 s and more; a usual grammar takes a few ms."""

LATE = Late(Guided(GuidedKind.GRAMMAR, ('root ::= "go" ' + " ".join(["[a-z]*"] * 9_000),)), b"go")
