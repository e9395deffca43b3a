"""Which chat templates are known to render quickly in the process that holds everybody's streams.

A template is a program that a worker sends. It may run without end, double a text until no memory is left, or compute
with large numbers while it is compiled. So this module estimates, without running it, how many characters a template
copies for the longest chat that is prepared inside. One above WORK_MAX, or with a part that is not known here, is
rendered in a helper process: see `prompt_encoder.py`. The estimate may be too high, never too low.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

from jinja2 import nodes

from services.models.chat_template import TEMPLATES_KEPT, parsed
from services.models.tokenizers.inside import CHARACTERS_INSIDE_MAX

MESSAGES_INSIDE_MAX = 256
"""A template may look at each message for each other one."""
SOURCE_CHARACTERS_MAX = 32_768
"""The longest template, with its special tokens, that is judged at all."""
WORK_MAX = 256 << 20
"""Characters that a template may copy, at most. The idioms of the usual models need a quarter of it."""
NODE_WORK = 256
"""What it costs to compute one node of a template, in characters that might be copied instead."""
LOOPS_NESTED_MAX = 3
REPR_FACTOR = 10
"""How much longer a text may be in Python's notation, as of a list that has it: "\\U000e0001" is one character."""

_SHORT = 32
"""At least the length of a role."""


class _Unknown(Exception):
    """The template has a part whose cost is not known, or too high."""


class _Value(NamedTuple):
    """What a value may need.

    fixed: characters, at most. local: further ones, in all turns of the innermost loop together.
    kind: "messages", "message", "nothing" (undefined, None or False), or "".
    """

    fixed: int = 0
    local: int = 0
    kind: str = ""

    @property
    def size(self) -> int:
        return self.fixed + self.local

    def plus(self, other: "_Value") -> "_Value":
        return _Value(self.fixed + other.fixed, self.local + other.local)

    def times(self, factor: int) -> "_Value":
        return _Value(self.fixed * factor, self.local * factor)


_NOTHING = _Value(kind="nothing")
_MESSAGES = _Value(CHARACTERS_INSIDE_MAX * REPR_FACTOR, kind="messages")
_FIELDS = {"role": _SHORT, "content": CHARACTERS_INSIDE_MAX, "name": CHARACTERS_INSIDE_MAX}
"""The fields of a message, and their lengths."""
_FILTERS: Mapping[str, int] = {
    **dict.fromkeys(("trim", "first", "last", "default", "d", "safe", "selectattr", "rejectattr", "reverse"), 1),
    **dict.fromkeys(("length", "count", "int"), 0),
    **dict.fromkeys(("upper", "lower", "capitalize", "title"), 3),
    **dict.fromkeys(("list", "string", "tojson"), REPR_FACTOR),
}
"""How many times as long as its operand the value of a filter may be."""
_METHODS: Mapping[str, int] = {
    **dict.fromkeys(("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "get"), 1),
    **dict.fromkeys(("startswith", "endswith", "isdigit", "isspace", "find", "count"), 0),
    **dict.fromkeys(("upper", "lower", "capitalize", "title"), 3),
    **dict.fromkeys(("split", "splitlines"), REPR_FACTOR),
}
"""The same for methods of texts."""
_SAME_KIND = frozenset({"list", "selectattr", "rejectattr", "reverse"})
_GLOBALS = frozenset(
    (
        *("add_generation_prompt", "range", "dict", "lipsum", "cycler", "joiner"),
        *("namespace", "raise_exception", "strftime_now"),
    )
)
_OF_LOOPS = frozenset(["index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"])


@lru_cache(maxsize=TEMPLATES_KEPT)
def renders_inside(source: str, bos_token: str, eos_token: str) -> bool:
    """Whether the template is known to be quick for MESSAGES_INSIDE_MAX messages of CHARACTERS_INSIDE_MAX together."""
    if len(source) + len(bos_token) + len(eos_token) > SOURCE_CHARACTERS_MAX:
        return False
    try:
        special = {"bos_token": _Value(len(bos_token)), "eos_token": _Value(len(eos_token))}
        _Reader({"messages": _MESSAGES} | special).read(parsed(source).body)
    except Exception:  # _Unknown, or that the template cannot be parsed or is nested too deeply.
        return False
    return True


class _Reader:
    """Walks over a template, adding up what it costs. Its methods raise _Unknown.

    `ns`: the attributes of namespaces, which outlive the turn of a loop that sets them. `turns`: how often the
    statements that are read may run.
    """

    def __init__(self, names: Mapping[str, _Value]) -> None:
        self._names = dict(names)
        self._ns: dict[tuple[str, str], _Value] = {}
        self._namespaces: set[str] = set()
        self._work = 0
        self._turns = 1
        self._depth = 0

    def read(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            match node:
                case nodes.Output():
                    for one in node.nodes:
                        self._count(self._value(one))
                case nodes.If():
                    self._read_if(node)
                case nodes.For():
                    self._read_for(node)
                case nodes.Assign():
                    self._assign(node)
                case nodes.Macro():  # A call of it is unknown.
                    self._define(node.name, _Value())
                case nodes.Break() | nodes.Continue():
                    pass
                case _:
                    raise _Unknown

    def _count(self, value: _Value) -> None:
        """Count that a value is copied."""
        self._work += self._turns * (value.fixed + NODE_WORK) + value.local
        if self._work > WORK_MAX:
            raise _Unknown

    def _read_if(self, node: nodes.If) -> None:
        if not self._is_nothing(node.test):
            self.read(node.body)
        for other in node.elif_:
            self._read_if(other)
        self.read(node.else_)

    def _is_nothing(self, test: nodes.Node) -> bool:
        """Whether the condition is never true."""
        if isinstance(test, nodes.And):
            return self._is_nothing(test.left) or self._is_nothing(test.right)
        return self._value(test).kind == "nothing"

    def _read_for(self, node: nodes.For) -> None:
        items = self._value(node.iter)
        if items.kind == "nothing":
            self.read(node.else_)
            return
        if node.recursive or self._depth == LOOPS_NESTED_MAX:
            raise _Unknown
        self._count(items)
        outer = self._names, self._turns
        self._turns *= MESSAGES_INSIDE_MAX if items.kind == "messages" else items.fixed
        self._turns = max(1, self._turns + items.local)
        self._depth += 1
        work = self._work
        before = self._turn_of(node, items, outer[0])
        self._work = work
        if self._turn_of(node, items, outer[0]) != before:
            raise _Unknown  # A text that grows with each turn.
        self._depth -= 1
        self._names, self._turns = outer
        self.read(node.else_)

    def _turn_of(self, node: nodes.For, items: _Value, outer: Mapping[str, _Value]) -> dict[tuple[str, str], _Value]:
        """Read the body of a loop once. Returns the attributes of namespaces after that."""
        self._names = {name: value._replace(fixed=value.size, local=0) for name, value in outer.items()}
        item = _Value(0, items.size, "message" if items.kind == "messages" else "")
        targets = [node.target] if isinstance(node.target, nodes.Name) else list(node.target.find_all(nodes.Name))
        for target in targets:
            self._names.pop(target.name, None)
            self._define(target.name, item)
        if node.test is not None:
            self._value(node.test)
        self.read(node.body)
        return dict(self._ns)

    def _assign(self, node: nodes.Assign) -> None:
        target, value = node.target, node.node
        if isinstance(target, nodes.NSRef):
            self._set(target.name, target.attr, self._value(value))
        elif not isinstance(target, nodes.Name):
            raise _Unknown
        elif isinstance(value, nodes.Call) and _name_of(value.node) == "namespace":
            self._assign_namespace(target.name, value)
        else:
            self._define(target.name, self._value(value))

    def _define(self, name: str, value: _Value) -> None:
        if name == "loop" or name in self._namespaces:
            raise _Unknown
        self._names[name] = _either(self._names.get(name), value)

    def _assign_namespace(self, name: str, call: nodes.Call) -> None:
        if call.args or call.dyn_args or call.dyn_kwargs or not self._names.keys().isdisjoint((name, "namespace")):
            raise _Unknown
        self._namespaces.add(name)
        for one in call.kwargs:
            self._set(name, one.key, self._value(one.value))

    def _set(self, name: str, attribute: str, value: _Value) -> None:
        if value.kind in ("messages", "message"):
            raise _Unknown
        self._ns[name, attribute] = _either(self._ns.get((name, attribute)), _Value(value.size))

    def _value(self, node: nodes.Node) -> _Value:
        """What the value of an expression may need. Counts what it costs to compute it."""
        if isinstance(node, (nodes.Const, nodes.TemplateData, nodes.Name)):
            return self._simple(node)
        self._count(_Value())
        match node:
            case nodes.Getattr() | nodes.Getitem():
                return self._part(node)
            case nodes.Filter():
                return self._filtered(node)
            case nodes.Call():
                return self._called(node)
            case nodes.CondExpr():
                self._value(node.test)
                return _either(self._value(node.expr1), self._value(node.expr2) if node.expr2 else _NOTHING)
            case nodes.List() | nodes.Tuple() | nodes.Dict() | nodes.Pair():
                parts = list(node.iter_child_nodes())
                found = self._sum(parts).times(REPR_FACTOR)
                return self._counted(_Value(found.fixed + len(parts), found.local))
            case nodes.Add() | nodes.Sub() | nodes.Concat() | nodes.And() | nodes.Or():
                return self._counted(self._sum(node.iter_child_nodes()))
        return self._flag(node)

    def _simple(self, node: nodes.Const | nodes.TemplateData | nodes.Name) -> _Value:
        if isinstance(node, nodes.TemplateData):
            return _Value(len(node.data))
        if isinstance(node, nodes.Name):
            if node.name in self._namespaces:
                raise _Unknown
            return self._names.get(node.name, _Value() if node.name in _GLOBALS else _NOTHING)
        if node.value is None or node.value is False:
            return _NOTHING
        return _Value(len(node.value)) if isinstance(node.value, str) else _Value()

    def _counted(self, value: _Value) -> _Value:
        self._count(value)
        return value

    def _sum(self, parts: Iterable[nodes.Node]) -> _Value:
        found = [self._value(part.expr if isinstance(part, nodes.Operand) else part) for part in parts]
        return reduce(_Value.plus, found, _Value())

    def _part(self, node: nodes.Getattr | nodes.Getitem) -> _Value:
        """An attribute or an item."""
        key = node.attr if isinstance(node, nodes.Getattr) else _constant_of(node.arg)
        owner = _name_of(node.node)
        if owner in self._namespaces and isinstance(node, nodes.Getattr):
            return self._ns.get((owner, node.attr), _Value())
        if owner == "loop" and key in _OF_LOOPS:
            return _Value()
        whole = self._value(node.node)
        if isinstance(node, nodes.Getitem):
            self._sum(node.arg.iter_child_nodes() if isinstance(node.arg, nodes.Slice) else [node.arg])
            if isinstance(node.arg, nodes.Slice):
                return self._counted(whole)
        if owner == "loop":
            raise _Unknown
        if whole.kind == "messages":
            return whole._replace(kind="message")
        if whole.kind == "message" and isinstance(key, str):
            return _field(whole, key)
        return _NOTHING if whole.kind == "nothing" else whole._replace(kind="")

    def _flag(self, node: nodes.Node) -> _Value:
        """An operator whose value is short."""
        match node:
            case nodes.Compare():
                self._counted(self._sum(node.iter_child_nodes()))
            case nodes.Test():
                self._counted(self._sum([node.node, *node.args]))
            case nodes.Not() | nodes.Neg():
                self._value(node.node)
            case nodes.Mod():
                if self._value(node.left).size:
                    raise _Unknown  # Texts have an operator `%` too, which may make them longer.
                self._value(node.right)
            case _:
                raise _Unknown
        return _Value()

    def _filtered(self, node: nodes.Filter) -> _Value:
        if node.node is None or node.dyn_args or node.dyn_kwargs:
            raise _Unknown
        operand = self._value(node.node)
        further = self._sum([*node.args, *(one.value for one in node.kwargs)])
        self._count(operand)
        factor = _factor(node.name, [*node.args, *node.kwargs], _FILTERS)
        if node.name in _SAME_KIND and operand.kind == "messages":
            return operand
        if node.name in ("first", "last") and operand.kind == "messages":
            return operand._replace(kind="message")
        return self._counted(operand.plus(further).times(factor))

    def _called(self, node: nodes.Call) -> _Value:
        if node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise _Unknown
        further = self._sum(node.args)
        if isinstance(node.node, nodes.Getattr):
            given = self._counted(self._value(node.node.node).plus(further))
            factor = _factor(node.node.attr, node.args, _METHODS)
            return self._counted(given.times(factor))
        name = _name_of(node.node)
        form = _constant_of(node.args[0])
        if name in self._names or name not in ("raise_exception", "strftime_now"):
            raise _Unknown
        if name == "strftime_now" and not (isinstance(form, str) and not any(map(str.isdigit, form))):
            raise _Unknown  # A digit may be the width of a field.
        return further.times(_SHORT) if name == "strftime_now" else _NOTHING


def _field(message: _Value, key: str) -> _Value:
    """A field of a message. Others are undefined, but for the methods of a dictionary."""
    if key not in _FIELDS:
        return message._replace(kind="") if hasattr(dict, key) else _NOTHING
    length = _FIELDS[key]
    in_all = length * MESSAGES_INSIDE_MAX if key == "role" else length
    return _Value(min(message.fixed, length), in_all if message.local else 0)


def _name_of(node: nodes.Node) -> str:
    return node.name if isinstance(node, nodes.Name) else ""


def _constant_of(node: nodes.Node) -> object:
    return node.value if isinstance(node, nodes.Const) else None


def _either(one: _Value | None, other: _Value) -> _Value:
    """What any of two values may need."""
    if one is None or one.kind == "nothing":
        return other
    if other.kind == "nothing":
        return one
    kind = one.kind if one.kind == other.kind else ""
    return _Value(max(one.fixed, other.fixed), max(one.local, other.local), kind)


def _factor(name: str, arguments: Sequence[nodes.Node], known: Mapping[str, int]) -> int:
    """How many times as long as operand and arguments together a filter or method may make a text. Raises _Unknown."""
    if name in ("replace", "join"):
        if not all(isinstance(one, nodes.Const) for one in arguments):
            raise _Unknown
        return 1 + sum(len(str(_constant_of(one))) for one in arguments)
    if name not in known or (name == "tojson" and arguments):  # An indentation may be of any length.
        raise _Unknown
    return known[name]
