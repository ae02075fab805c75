"""Writes the lines of the fuzz from the grammar, with one random generator.

A line is drawn when those before it have run, so that it can speak of what they made.
"""

from __future__ import annotations

import inspect
import random
import re

from fuzzing import hostile
from fuzzing.grammar import PURE, RULES
from needle import _C
from needle.testing import LAYOUTS, OPS

TYPES = {
    "NDArray": _C.NDArray,
    "Device": _C.Device,
    "Event": _C.Event,
    "Download": _C.Download,
    "Graph": _C.Graph,
    "Staging": _C.Staging,
    "Handle": type(_C.empty(0)._handle),
    "Flat": type(_C.empty((3, 4)).permute((1, 0)).flat),
}
# An object of each type but NDArray; no backend here makes a Graph.
OBJECTS = {
    "Device": "_C.cpu()",
    "Event": "_C.Event()",
    "Download": "_C.Download(<array>)",
    "Graph": "(<thing>)",
    "Staging": "_C.Staging(48)",
    "Handle": "<array>._handle",
    "Flat": "made((3, 4)).permute((1, 0)).flat",
    "NDArray": "<array>",
}
# They would change more than the object, or make a type and not an object.
SKIPPED = ("__class__", "__init_subclass__", "__subclasshook__", "__new__", "__doc__", "__module__")
CALLABLES = [f"_C.{name}" for name in dir(_C) if inspect.isbuiltin(getattr(_C, name))] + [
    f"{kind}.{name}" for kind, cls in TYPES.items() for name in vars(cls) if name not in SKIPPED
]


def ops_of(*kinds: str) -> list[str]:
    return [name for name, op in OPS.items() if op.kind in kinds]


WORDS = {  # rules that the table of ops makes
    "unary": ops_of("EW1"),
    "binary": ops_of("EW2", "CMP"),
    "reduction": ops_of("RED", "ARG"),
    "attribute": [name.partition(".")[2] for name in CALLABLES if name.startswith("NDArray.")],
}
DTYPES = ("float32", "bfloat16", "float16", "int32", "int64", "uint8", "bool", "uint16")
LETTERS = sorted({a for op in OPS.values() for o in op.operands for a in o.axes} - {"*"})
STORED = {"f4": "float32", "i4": "int32", "i8": "int64", "b1": "bool"}
NUMPY_DTYPES = (
    "float32 float64 float16 int8 int32 int64 uint8 uint16 uint64 bool complex64 object U3 S2 "
    "longdouble datetime64[s] V4"
).split()
NUMPY_LAYOUTS = "plain misaligned fortran negative stepped swapped broadcast readonly".split()
CHANGES, ITEMS = "clear pop grow deepen replace".split(), "Number Index Item Array Float".split()


def read_rules() -> tuple[dict[str, list[str]], dict[str, int]]:
    """Rule -> what it may be; kind of line -> how often it is drawn."""
    rules, kinds = dict(WORDS), {}
    for line in RULES.splitlines():
        if not line.startswith(" "):
            name, _, often = line.partition(" ")
            rules[name] = []
            if often:
                kinds[name] = int(often)
            continue
        for text in line.strip().split(" | "):
            times, text = re.fullmatch(r"(?:\*(\d+) )?(.*)", text).groups()
            rules[name] += ["" if text == "NOTHING" else text] * int(times or 1)
    return rules, kinds


GRAMMAR, KINDS = read_rules()


class Lines:
    """Draws lines; `names` is where they run. The callables that are called as they are found go
    into `reached`."""

    def __init__(self, rng: random.Random, names: dict, reached: set) -> None:
        self.rng, self.names, self.reached = rng, names, reached
        self.count = 0
        self.bound: dict[str, str] = {}  # of the line being drawn

    def draw(self) -> tuple[list[str], tuple | None]:
        """Lines, and the labels of the arrays that the last of them may change; None: any."""
        self.bound = {}
        kind = self.rng.choices(list(KINDS), KINDS.values())[0] if self.count else "MAKE"
        if kind == "STRUCTURED":
            lines, writes = self.on_a_case()
        else:
            lines, writes = [self.word(kind)], () if kind in PURE else None
        tame = not any(word in line for line in lines for word in ("lambda", "changing", "__array"))
        return lines, writes if tame else None

    def word(self, rule: str) -> str:
        return self.fill(self.rng.choice(GRAMMAR[rule]))

    def fill(self, text: str) -> str:
        return re.sub(r"<(?:(\w+)=)?(\w+)>", self.drawn, text)

    def drawn(self, found: re.Match) -> str:
        name, rule = found.groups()
        if name is None and rule in self.bound:
            return self.bound[rule]
        text = self.word(rule) if rule in GRAMMAR else getattr(self, rule)()
        if name or rule == "new":
            self.bound[name or rule] = text
        return text

    # ---- words that no list can give -------------------------------------------------------------
    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def variable(self) -> str:
        """An array that is there."""
        there = [
            name
            for name, value in self.names.items()
            if name[0] == "v" and issubclass(type(value), _C.NDArray)
        ]
        return self.rng.choice(there) if there else "made((3, 4))"

    def sizes(self, most: int = 2000) -> tuple[int, ...]:
        ndim = self.rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 8))
        while True:
            sizes = tuple(self.rng.choice((0, 1, 1, 2, 3, 3, 4, 5, 7, 9)) for _ in range(ndim))
            product = 1
            for size in sizes:
                product *= max(size, 1)
            if product <= most:
                return sizes

    def of_shape(self, shape: tuple, dtype: str) -> str:
        layout = self.rng.choice(LAYOUTS) if self.rng.random() < 0.6 else "contiguous"
        return f"made({tuple(shape)}, {dtype!r}, {layout!r}, {self.rng.randrange(99)})"

    def laid_out(self) -> str:
        return self.of_shape(self.sizes(), self.rng.choice(DTYPES))

    def empty_view(self) -> str:
        """No elements, but strides that pass what an int64 holds when they are walked."""
        sizes = [self.rng.choice((0, 1, 3, 100, 300)) for _ in range(self.rng.randrange(1, 5))]
        sizes[self.rng.randrange(len(sizes))] = 0
        few = (0, 1, -1, 2**52, 2**55, 2**57, -(2**57), 2**61 - 1)
        strides = [self.rng.choice(few) for _ in sizes]
        return f"made((4,)).as_strided({tuple(sizes)}, {tuple(strides)})"

    def wild(self) -> str:
        dtype, layout = self.rng.choice(NUMPY_DTYPES), self.rng.choice(NUMPY_LAYOUTS)
        return f"wild({dtype!r}, {self.sizes()}, {layout!r}, {self.rng.randrange(9)})"

    def changing(self, items: tuple = (1, 2, 1)) -> str:
        """A list that changes while it is read."""
        at, how, kind = self.rng.randrange(9), self.rng.choice(CHANGES), self.rng.choice(ITEMS)
        return f"changing({list(items)}, {at}, {how!r}, {kind})"

    def integers(self, good: tuple | None = None) -> str:
        """A shape, axes, strides: `good`, or what is not."""
        good = self.sizes() if good is None else good
        kind = self.rng.randrange(20)
        if kind < 11:
            return repr(good if kind < 7 else list(good))
        if kind < 14:
            return self.changing(good)
        if kind < 17:
            items = [str(size) for size in (*good, 1)]
            items[self.rng.randrange(len(items))] = self.word("integer")
            return "[" + ", ".join(items) + "]"
        if kind < 18:
            items = ", ".join(map(str, good)) or "1"
            return f"Sequence({len(good)}, {items}{self.word('then')})"
        return self.word("integer" if kind < 19 else "thing")

    # ---- lines that the table of ops gives -------------------------------------------------------
    def on_a_case(self) -> tuple[list[str], tuple]:
        """An op on one of the cases of needle.testing, with at most a few operands changed."""
        name = self.rng.choice([name for name in ops_of("OP") if hostile.small_cases(name)])
        op, given = OPS[name], self.new()
        dtype = self.rng.choice(("float32", "float32", "bfloat16", "float16"))
        layout = self.rng.choice(LAYOUTS) if self.rng.random() < 0.3 else "contiguous"
        case = f"operands({name!r}, {self.rng.randrange(50)}, {dtype!r}, {layout!r})"
        lines = [f"{given} = {case}"]
        arrays = [o.name for o in op.inputs if o.is_array]
        for _ in range(self.rng.choice((0, 0, 1, 1, 1, 2, 3))):
            operand = self.rng.choice(op.inputs)
            self.bound["old"] = f"was({given}[{operand.name!r}])"
            self.bound["own_operand"] = given
            self.bound["peer"] = repr(self.rng.choice(arrays))
            rule = (
                "changed" if operand.is_array else "integer" if operand.mode == "I64" else "number"
            )
            lines.append(f"{given}[{operand.name!r}] = {self.word(rule)}")
        call = f"(**{given})" if self.rng.random() < 0.2 else f"(*{given}.values())"
        lines.append(f"_C.{name}{call}")
        return lines, tuple(f"{given}[{o.name!r}]" for o in op.inputs if o.is_written)

    def on_letters(self) -> str:
        """An op on operands made from its letters: right in their axes, wild in their values."""
        name = self.rng.choice(ops_of("OP"))
        sizes = {letter: self.rng.choice((0, 1, 2, 3, 4, 5, 8, 17)) for letter in LETTERS}
        if self.rng.random() < 0.8:
            sizes["P"], sizes["R"] = 3, self.rng.choice((1, 2, 4))
            sizes["D"] = 2 * sizes["R"]
        dtype = self.rng.choice(("float32", "float32", "bfloat16", "float16"))
        star, given = self.sizes(), []
        for operand in OPS[name].inputs:
            if not operand.is_array:
                tame = self.rng.random() < 0.7
                given.append(
                    self.rng.choice(("0", "1", "2", "0.1")) if tame else self.word("number")
                )
            elif "OPT" in operand.mode and self.rng.random() < 0.3:
                given.append("None")
            elif self.rng.random() < 0.05:
                given.append(self.word("operand"))
            else:
                shape = list(star) if operand.axes == "*" else [sizes[a] for a in operand.axes]
                if shape and self.rng.random() < 0.05:
                    shape[self.rng.randrange(len(shape))] += 1
                stored = dtype if operand.dtype == "F" else STORED.get(operand.dtype)
                given.append(self.of_shape(tuple(shape), stored or self.rng.choice(DTYPES)))
        return f"_C.{name}({', '.join(given)})"

    def any_call(self) -> str:
        """A callable as it is found in the module, with anything."""
        name = self.rng.choice(CALLABLES)
        self.reached.add(name)
        kind, _, attribute = name.partition(".")
        words = ("array", "thing", "integer", "number", "integers", "dtype", "key")
        count = self.rng.choice((0, 1, 1, 2, 2, 3, 4, 5))
        given = [self.fill(f"<{self.rng.choice(words)}>") for _ in range(count)]
        if self.rng.random() < 0.1:
            given.append(self.rng.choice(("dtype", "device", "shape", "axis", "x")) + "=" + "None")
        if kind == "_C":
            return f"{name}({', '.join(given)})"
        of = self.fill(OBJECTS[kind])
        if not callable(getattr(TYPES[kind], attribute)):
            return f"{of}.{attribute}"
        if self.rng.random() < 0.2:  # unbound, perhaps on what is not its own
            of = of if self.rng.random() < 0.5 else self.word("thing")
            return f"TYPES[{kind!r}].{attribute}({', '.join([of, *given])})"
        return f"{of}.{attribute}({', '.join(given)})"
