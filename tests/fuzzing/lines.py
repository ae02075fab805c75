"""Writes the lines of the fuzz: Python in the words of hostile.py, drawn with one random generator.

A line is drawn when those before it have run, so that it can speak of what they made. Each function
of LINES draws a line of one kind; PURE are those that change no array that was there before.
"""

from __future__ import annotations

import inspect
import random

from harness import LAYOUTS, OPS

from fuzzing import hostile
from needle import _C

DTYPES = ("float32", "bfloat16", "float16", "int32", "int64", "uint8", "bool", "uint16")
LARGEST = 20_000  # elements of an array that later lines may speak of
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
FUNCTIONS = [name for name in dir(_C) if inspect.isbuiltin(getattr(_C, name))]
ELEMENTWISE = [name for name, op in OPS.items() if op.kind in ("EW1", "EW2", "CMP")]
REDUCTIONS = [name for name, op in OPS.items() if op.kind in ("RED", "ARG")]
STRUCTURED = [name for name, op in OPS.items() if op.kind == "OP"]
# What would change the process rather than the object, or runs what the line does not say.
SKIPPED = ("__class__", "__init_subclass__", "__subclasshook__", "__dir__", "__new__")
CALLABLES = [f"_C.{name}" for name in FUNCTIONS] + [
    f"{kind}.{name}" for kind, cls in TYPES.items() for name in vars(cls) if name not in SKIPPED
]

NUMBERS = (
    "0 1 -1 2 3 7 -0.0 0.5 1e300 -1e-45 float('nan') float('inf') -float('inf') True False 2**31 "
    "-2**31-1 2**53+1 2**63-1 2**63 -2**63 2**64 10**400 -10**400 np.float32(1.5) np.float16(-0.0) "
    "np.longdouble(3) np.int8(-3) np.uint64(2**64-1) np.int64(-2**63) np.bool_(True) 1j np.str_('3') "
    "np.float64('nan') np.datetime64(3,'s') np.timedelta64(3,'s') Fraction(1,3) Decimal('1.5') None"
).split()
THINGS = (
    "None|...|'text'|'\\ud800'|''|b'bytes'|bytearray(b'12345678')|[]|()|{}|{'a': 1}|{1, 2}|[[]]|"
    "[[], [1]]|nested(9)|nested(8)|nested(70)|selfish()|selfish(tuple)|(i for i in (1, 2))|range(5)|"
    "iter([1, 2])|object()|int|float|type|np|_C|_C.NDArray|_C.CudaError|np.float32|np.dtype('>f4')|"
    "_C.cpu()|_C.cuda()|_C.cuda(63)|print|slice(None)|memoryview(b'abcd')|memoryview(b'')|"
    "(ctypes.c_float * 4)()|[1, [2, 3]]|[True, 2**63]|['1', 2]|other().array([1., 2.])|1 .__add__|"
    "other().cpu()|NotImplemented|Raised|first|iter(made((2, 3)))|made((3,)).__dlpack__()|_C.Event()|"
    "made((2, 3))._handle|made((3, 4)).permute((1, 0)).flat|_C.Staging(64)|type|complex(1, 2)"
).split("|")
WRONG_DTYPES = (
    "'float64' 'f4' 'Float32' '' '\\ud800' None 3 object np.float64 np.complex64 np.dtype('>f4') "
    "np.dtype([('a','f4')]) OwnStr('x') OwnStr(Raised) Named('int32') Named(3) Named(Raised) b'int32' "
    "Missing(3) Missing('uint8') [] np.void 'bool_' ..."
).split()
RIGHT_DTYPES = ("np.float32 np.dtype('int64') bool np.uint8 np.int32 np.bool_ np.uint16").split()
NUMPY_DTYPES = (
    "float32 float64 float16 int8 int32 int64 uint8 uint16 uint64 bool complex64 object U3 S2 longdouble "
    "datetime64[s] V4"
).split()
NUMPY_LAYOUTS = "plain misaligned fortran negative stepped swapped broadcast readonly".split()


class Lines:
    """Draws lines; `names` is where they run."""

    def __init__(self, rng: random.Random, names: dict, reached: set) -> None:
        self.rng, self.names, self.reached = rng, names, reached
        self.count = 0

    # ---- choices ---------------------------------------------------------------------------------
    def one(self, *choices):
        return self.rng.choice(choices)

    def odds(self, share: float) -> bool:
        return self.rng.random() < share

    def variables(self, kind: type) -> list[str]:
        return [n for n, v in self.names.items() if n[0] == "v" and issubclass(type(v), kind)]

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    # ---- words -----------------------------------------------------------------------------------
    def action(self) -> str:
        """What a callback does."""
        array = self.array(new=False)
        return self.rng.choice([
            "gc.collect(0)",
            "gc.collect()",
            f"drop({array!r})",
            f"drop({array!r}), gc.collect(0)",
            "Raised and Index(Raised).answer()",
            "_C.cpu().empty_cache()",
            "aside(lambda: _C.cpu().empty_cache())",
            f"{array} + {array}",
            f"{array}.fill(2)",
            f"{array}.__init__([1.0, 2.0])",
            f"{array}.__init__(np.ones((2,) * {self.rng.randrange(9)}))",
            f"aside(lambda: {array}.copy())",
            f"drop({array!r}), made((5,)), gc.collect(0)",
            "_C.cuda_reset()",
            f"first({array})",
        ])  # fmt: skip

    def then(self, likely: float = 0.5) -> str:
        return f", then=lambda: ({self.action()})" if self.odds(likely) else ""

    def integer(self) -> str:
        kind = self.rng.randrange(20)
        if kind < 13:
            return str(self.rng.choice((0, 1, 2, 3, 4, 5, 6, 8, -1, -2)))
        if kind < 16:
            return self.rng.choice(NUMBERS)
        answers = self.one("2", "1", "3, -1", "0", "Raised", "2**63", "1.5", "None, 2", "True")
        return f"{self.one('Index', 'Number', 'OwnInt', 'Item')}({answers}{self.then()})"

    def number(self) -> str:
        if self.odds(0.6):
            return self.rng.choice(NUMBERS)
        answers = self.one(
            "1.5", "2", "Raised", "'text'", "1e300", "1.0, Raised", "3, 2**70", "float('nan')", "None",
            "2.0, float('inf')", "True, Raised",
        )  # fmt: skip
        kinds = ("Index", "Float", "Number", "OwnInt", "OwnFloat", "Item")
        return f"{self.rng.choice(kinds)}({answers}{self.then()})"

    def shape_values(self, most: int = 2000) -> tuple[int, ...]:
        ndim = self.rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 8))
        while True:
            sizes = tuple(self.rng.choice((0, 1, 1, 2, 3, 3, 4, 5, 7, 9)) for _ in range(ndim))
            product = 1
            for size in sizes:
                product *= max(size, 1)
            if product <= most:
                return sizes

    def changing(self, items) -> str:
        how = self.one("clear", "pop", "grow", "deepen", "replace")
        kind = self.one("Number", "Index", "Item", "Array", "Float")
        return f"changing({list(items)}, {self.rng.randrange(9)}, {how!r}, {kind})"

    def integers(self, good=None) -> str:
        """A shape, axes, strides: `good`, or what is not."""
        good = self.shape_values() if good is None else tuple(good)
        kind = self.rng.randrange(20)
        if kind < 11:
            return repr(good if self.odds(0.6) else list(good))
        if kind < 14:
            return self.changing(good)
        if kind < 17:
            items = [str(size) for size in good] + ([self.integer()] if self.odds(0.3) else [])
            if items:
                items[self.rng.randrange(len(items))] = self.integer()
            return "[" + ", ".join(items) + "]"
        if kind < 18:
            return f"Sequence({len(good)}, {', '.join(map(str, good)) or '1'}{self.then()})"
        return self.integer() if self.odds(0.5) else self.thing()

    def dtype(self, good: str | None = None) -> str:
        if self.odds(0.8):
            return repr(good or self.rng.choice(DTYPES))
        return self.rng.choice(RIGHT_DTYPES if self.odds(0.5) else WRONG_DTYPES)

    def device(self) -> str:
        return self.one("None", "_C.cpu()", "_C.cpu()", "None", "_C.cuda()", "_C.cpu(1)", self.thing())

    def made(self, shape=None, dtype: str | None = None) -> str:
        """A new array."""
        shape = self.shape_values() if shape is None else tuple(shape)
        layout = self.rng.choice(LAYOUTS) if self.odds(0.6) else "contiguous"
        dtype = dtype or self.rng.choice(DTYPES)
        text = f"made({shape}, {dtype!r}, {layout!r}, {self.rng.randrange(99)})"
        kind = self.rng.randrange(40)
        if kind < 2:
            return f"{self.one('Sub', 'Slim', 'Loud', 'Dying')}({text})"
        if kind == 2:
            return f"unmade({self.one('_C.NDArray', 'Sub', 'Slim', 'Loud')})"
        if kind == 3:
            return f"dying({text}, lambda: ({self.action()}))"
        if kind == 4:
            return f"other().array({text}.numpy())"
        if kind == 5:  # no elements, but strides that pass what an int64 holds when they are walked
            sizes = [self.rng.choice((0, 1, 3, 100, 300)) for _ in range(self.rng.randrange(1, 5))]
            sizes[self.rng.randrange(len(sizes))] = 0
            strides = [self.rng.choice((0, 1, -1, 2**57, 2**59, -(2**59), 2**61 - 1)) for _ in sizes]
            return f"made((4,)).as_strided({tuple(sizes)}, {tuple(strides)})"
        return text

    def array(self, new: bool = True) -> str:
        """An array that is there; sometimes a view of one."""
        there = self.variables(_C.NDArray)
        if not there or (new and self.odds(0.15)):
            return self.made() if new else "made((3, 4))"
        name = self.rng.choice(there)
        if not new or self.odds(0.7):
            return name
        return name + self.rng.choice((
            "[::-1]", "[1:]", "[:-1]", "[..., ::2]", "[..., None]", "[None]", ".flip()", "[:0]",
            ".reshape(-1)", ".permute(tuple(range(%s.ndim))[::-1])" % name, "[0]", "[..., 1:]",
        ))  # fmt: skip

    def numpy(self) -> str:
        kind = self.rng.randrange(12)
        dtype = self.rng.choice(NUMPY_DTYPES)
        text = f"wild({dtype!r}, {self.shape_values()}, {self.rng.choice(NUMPY_LAYOUTS)!r}, {self.rng.randrange(9)})"
        if kind == 0:
            return f"around({text}, lambda made, of: ({self.action()}))"
        if kind == 1:
            shape = self.one("(1,) * 12", "-1", "(2, -1)", "()")
            return f"around({text}, lambda made, of: setattr({self.one('made', 'of')}, 'shape', {shape}))"
        if kind == 2:
            return f"np.array([{self.number()}, {self.thing()}, 2], object)"
        if kind == 3:
            return self.one("np.array(1.5)", "np.zeros(3, [('a', 'f4')])", "np.float32(2)", "np.zeros((1,) * 12)")
        return text

    def thing(self) -> str:
        """Anything."""
        kind = self.rng.randrange(14)
        if kind < 5:
            return self.rng.choice(THINGS)
        if kind < 7:
            return self.number()
        if kind == 7:
            return self.numpy()
        if kind == 8:
            return self.array()
        if kind == 9:
            return self.changing([1.0, 2.0, 3.0])
        if kind == 10:
            return f"[{self.number()}, {self.number()}]"
        if kind == 11:
            name = self.one("Array", "Interface", "Struct", "Producer", "Callable", "Item", "Iterable")
            answers = self.one("np.ones(3)", "None", "Raised", "3", "np.ones(2), Raised", "iter([1, 2])", "[1, 2]",
                               "made((3,))", "made((3,)).__dlpack__()", "np.ones(3).__array_interface__")  # fmt: skip
            return f"{name}({answers}{self.then()})"
        if kind == 12:
            name = self.one("Truth", "Path", "Named", "Missing", "Equal", "Reflected", "OwnList", "OwnTuple", "OwnStr")
            return f"{name}({self.one('True', 'Raised', '3', 'None', 'NotImplemented', '[1, 2]')}{self.then()})"
        return f"Sequence({self.integer()}, {self.number()}, {self.number()}{self.then()})"

    def values(self) -> str:
        """What an array can be made of, or not."""
        kind = self.rng.randrange(8)
        if kind < 3:
            return self.numpy()
        if kind == 3:
            return self.array()
        if kind == 4:
            return self.changing([self.rng.randrange(5) for _ in range(3)])
        if kind == 5:
            return "[" + ", ".join(self.number() for _ in range(3)) + "]"
        return self.number() if kind == 6 else self.thing()

    def key(self) -> str:
        """An index."""
        def part() -> str:
            kind = self.rng.randrange(10)
            if kind < 4:
                return self.integer()
            if kind < 8:
                ends = [self.one("", "", self.integer()) for _ in range(3)]
                return "slice(" + ", ".join(end or "None" for end in ends) + ")"
            return self.one("None", "...", "True", "'a'", "[0]", self.thing())

        parts = [part() for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3, 9)))]
        return parts[0] if len(parts) == 1 else "(" + ", ".join(parts) + ")"

    def operand(self) -> str:
        """The other side of an operator."""
        kind = self.rng.randrange(10)
        if kind < 6:
            return self.array()
        return self.number() if kind < 8 else self.numpy() if kind == 8 else self.thing()

    def axes(self) -> str:
        good = [a for a in range(-3, 3) if self.odds(0.3)]
        return self.one("None", "0", "-1", "1", self.integers(good), self.integer())

    # ---- lines -----------------------------------------------------------------------------------
    def keep(self, expression: str) -> str:
        return f"{self.fresh()} = {expression}"

    def new_array(self) -> str:
        return self.keep(self.made())

    def construction(self) -> str:
        keyword = self.odds(0.3)
        dtype, device = self.dtype(), self.device()
        return self.keep(self.rng.choice((
            f"_C.array({self.values()}, {dtype})",
            f"_C.array({self.values()}, {self.one('dtype=', '')}{dtype}, device={device})",
            f"_C.array({self.values()})",
            f"_C.empty({self.integers()}, {dtype}, {device})",
            f"_C.empty(shape={self.integers()}, dtype={dtype})",
            f"{self.one('_C.NDArray', 'Sub', 'Slim')}({self.values()}, {'dtype=' if keyword else device + ', '}{dtype})",
            f"_C.NDArray({self.values()})",
            f"_C.NDArray.make({self.integers()}, {self.integers()}, None, {self.array()}._handle, {self.integer()})",
            f"_C.NDArray.make({self.integers()}, handle={self.array()}._handle, offset={self.integer()}, dtype={dtype})",
            f"_C.NDArray.make({self.integers()}, {self.one('None', self.integers())}, {device}, None, {self.integer()}, {dtype})",
            f"_C._rebuild({self.one('bytes(24)', 'bytearray(24)', self.thing())}, {self.integers((2, 3))}, {dtype}, {device})",
            f"_C.from_dlpack({self.producer()})",
            f"{self.array(new=False)}.__init__({self.values()}, dtype={dtype})",
            f"_C.NDArray.__new__({self.one('_C.NDArray', 'Sub', 'Loud', 'int', 'Dying')}, {self.thing()})",
        )))  # fmt: skip

    def producer(self) -> str:
        """What from_dlpack takes."""
        kind = self.rng.randrange(8)
        if kind == 0:
            return self.numpy()
        if kind == 1:
            return self.thing()
        if kind == 2:
            return f"{self.array()}.__dlpack__(max_version={self.one('(1, 0)', 'None', '(0, 9)')})"
        if kind == 3:
            return f"Producer({self.one('made((3,)).__dlpack__()', 'None', 'Raised', 'TypeError', '3')}{self.then()})"
        version = self.one("None", "(1, 0)", "(1, 5)")
        shape, strides, start = self.one(
            ((2, 3), None, 0), ((4,), (-1,), 12), ((3, 2), (1, 3), 0), ((0,), (5,), 0), ((), (), 4),
            ((2, 2), (0, 0), 0), ((1, 1, 1, 1, 1, 1, 1, 1), (2**60,) + (3,) * 7, 0), ((5, 1), (2, 9), 8),
            ((0, 3), (2**59, 1), 0), ((2,), (1,), 4096 - 8),
        )  # fmt: skip
        more = self.one("", "", ", deletes=False", f", flags={self.rng.randrange(4)}", ", byte_offset=64 if 0 else 0")
        dtype = self.one("(2, 32, 1)", "(0, 32, 1)", "(1, 8, 1)", "(1, 16, 1)", "(6, 8, 1)", "(2, 16, 1)")
        return f"capsule({shape}, {strides}, {dtype}, start={start}, version={version}{more})"

    def lying_capsule(self) -> str:
        """A capsule that must be refused, whatever is in its memory."""
        lie = self.rng.choice((
            "(2, 3), ndim=-1", "(2, 3), ndim=9", "(2, 3), ndim=2**31-1", "(2, -3)", "(2**40, 2**40)", "(2**62,)",
            "(2,), (2**62,)", "(2, 2), (2**62, -2**62)", "(2,), (-2**63,)", "(3,), start=1", "(3,), byte_offset=2",
            "(3,), None, (2, 64, 1)", "(3,), None, (2, 32, 2)", "(3,), None, (5, 64, 1)", "(3,), None, (0, 1, 1)",
            "(3,), device=(2, 0)", "(3,), device=(99, 0)", "(3,), device=(2, -1)", "(3,), device=(2, 2**31-1)",
            "(3,), version=(2, 0)", "(3,), version=(0, 9)", "(3,), name=b'dltensor2'", "(3,), name=b''",
            "(3,), name=b'used_dltensor'", "(3,), version=(1, 0), name=b'used_dltensor_versioned'",
        ))  # fmt: skip
        if self.odds(0.2):
            name = self.fresh()
            return f"{name} = capsule((3,)); _C.from_dlpack({name}); refused(lambda: _C.from_dlpack({name}))"
        return f"refused(lambda: _C.from_dlpack(capsule({lie})))"

    def operator_line(self) -> str:
        op = self.one("+", "-", "*", "/", "**", "@", "==", "!=", "<", "<=", ">", ">=")
        left, right = self.array(), self.operand()
        if self.odds(0.2):
            return self.keep(self.one(f"-{left}", f"+{left}", f"abs({left})", f"pow({left}, {right}, {self.operand()})",
                             f"{left}.maximum({right})", f"{left}.minimum({right})"))  # fmt: skip
        if self.odds(0.3):
            left, right = right, left
        return self.keep(f"{left} {op} {right}")

    def in_place(self) -> str:
        target = self.array(new=False)
        op = self.one("iadd", "isub", "imul", "itruediv", "ipow")
        right = target + self.one("", "[::-1]", ".flip()", "[..., :1]", "[:1]") if self.odds(0.4) else self.operand()
        return f"operator.{op}({target}, {right})"

    def elementwise_line(self) -> str:
        name = self.rng.choice(ELEMENTWISE)
        given = [self.array()] + [self.operand()] * (len(OPS[name].inputs) - 1)
        if self.odds(0.2):
            self.rng.shuffle(given)
        names = [o.name for o in OPS[name].inputs]
        if self.odds(0.15):
            return self.keep(f"_C.{name}(" + ", ".join(f"{n}={g}" for n, g in zip(names, given)) + ")")
        return self.keep(f"_C.{name}({', '.join(given)})")

    def reduction(self) -> str:
        if self.odds(0.5):
            return self.keep(f"_C.{self.rng.choice(REDUCTIONS)}({self.array()}, {self.integer()})")
        name = self.one("sum", "mean", "max", "min", "argmax", "argmin")
        keepdims = self.one("", ", keepdims=True", f", keepdims={self.thing()}")
        return self.keep(f"{self.array()}.{name}({self.axes()}{keepdims})")

    def structured(self) -> tuple[list[str], tuple]:
        """An op of the table on one of tests/cases/, with at most a few operands changed."""
        name = self.rng.choice([name for name in STRUCTURED if hostile.small_cases(name)])
        op, given = OPS[name], self.fresh()
        dtype = self.one("float32", "float32", "bfloat16", "float16")
        layout = self.rng.choice(LAYOUTS) if self.odds(0.3) else "contiguous"
        lines = [f"{given} = operands({name!r}, {self.rng.randrange(50)}, {dtype!r}, {layout!r})"]
        for _ in range(self.rng.choice((0, 0, 1, 1, 1, 2, 3))):
            operand = self.rng.choice(op.inputs)
            old = f"{given}[{operand.name!r}]"
            if not operand.is_array:
                new = self.integer() if operand.mode == "I64" else self.number()
            else:
                peer = self.rng.choice([o.name for o in op.inputs if o.is_array])
                new = self.rng.choice((
                    f"{given}[{peer!r}]", f"{given}[{peer!r}]", f"{old}.flip()", f"{old}[::-1]", f"{old}[1:]",
                    f"{old}[..., :-1]", f"{old}[..., None]", f"{old}[None]", f"{old}.astype({self.dtype()})",
                    f"{old}.permute(tuple(range({old}.ndim))[::-1])", f"{old}[..., ::2]", f"{old}[:0]",
                    f"{old}[:1].broadcast_to({old}.shape)", f"{given}[{peer!r}].flip()", "None", self.thing(),
                    self.array(), "unmade()", f"Sub({old})", f"{old} * 3 - 1", f"{old}.view('int32')",
                    f"_C.NDArray.make({old}.shape, {old}.strides, handle={old}._handle)",
                    f"{old}.reshape(-1)[:1].as_strided({old}.shape, (0,) * {old}.ndim)",
                ))  # fmt: skip
            lines.append(f"{old} = {new}")
        lines.append(f"_C.{name}(**{given})" if self.odds(0.2) else f"_C.{name}(*{given}.values())")
        return lines, tuple(f"{given}[{o.name!r}]" for o in op.inputs if o.is_written)

    def whole_structured(self) -> str:
        """An op on operands made from its letters: right in their axes, wild in their values."""
        name = self.rng.choice(STRUCTURED)
        sizes = {letter: self.rng.choice((0, 1, 2, 3, 4, 5, 8, 17)) for letter in "BTHDSNCKMVRXGPUE"}
        if self.odds(0.8):
            sizes["P"] = 3
            sizes["D"] = 2 * self.rng.choice((1, 2, 4))
            sizes["R"] = sizes["D"] // 2
        dtype = self.one("float32", "float32", "bfloat16", "float16")
        star, given = self.shape_values(), []
        for operand in OPS[name].inputs:
            if not operand.is_array:
                given.append(self.one("0", "1", "2", "0.1") if self.odds(0.7) else self.number())
            elif "OPT" in operand.mode and self.odds(0.3):
                given.append("None")
            elif self.odds(0.05):
                given.append(self.operand())
            else:
                shape = star if operand.axes == "*" else [sizes[axis] for axis in operand.axes]
                if self.odds(0.05) and shape:
                    shape = list(shape)
                    shape[self.rng.randrange(len(shape))] += self.one(-1, 1) if min(shape) else 1
                stored = {"F": dtype, "f4": "float32", "i4": "int32", "i8": "int64"}
                given.append(self.made(shape, stored.get(operand.dtype) or self.rng.choice(DTYPES)))
        return self.keep(f"_C.{name}({', '.join(given)})")

    def method(self) -> str:
        x = self.array()
        return self.keep(f"{x}." + self.rng.choice((
            f"astype({self.dtype()})", f"view({self.dtype()})", f"to({self.device()})", f"reshape({self.integers()})",
            f"reshape({self.integer()}, -1)", f"permute({self.integers(range(self.rng.randrange(5)))})",
            f"permute({self.integer()}, {self.integer()})", f"broadcast_to({self.integers()})", "copy()", "compact()",
            f"broadcast_to(({self.rng.randrange(5)},) + {x}.shape)", f"as_strided({self.integers()}, {self.integers()})",
            f"flip({self.axes()})", f"flip({self.integer()}, {self.integer()})", f"pad({self.pads(x)})", "exp()", "log()",
            f"process_slice(slice({self.integer()}, {self.integer()}, {self.integer()}), {self.integer()})", "sqrt()",
            "item()", "tolist()", "numpy()", "is_compact()", "__copy__()", f"__deepcopy__({self.thing()})", "tanh()",
            f"__array__({self.one('', 'None', 'np.float64', self.thing())})", f"__array__(copy={self.one('False', 'True', '3')})",
            f"__array__(np.float32, copy={self.one('False', 'None')})", "__reduce__()", f"__reduce_ex__({self.integer()})",
            f"__dlpack__(max_version={self.one('(1, 0)', 'None', '(0, 2)', self.thing())}, copy={self.one('None', 'True', 'False')})",
            f"__dlpack__(stream={self.thing()}, dl_device={self.one('(1, 0)', '(2, 0)', self.thing())})", "__dlpack_device__()",
            f"__dlpack__(max_version={self.integers((1, 0))})", "__len__()", "__repr__()", "__str__()", "__bool__()",
            "__int__()", "__float__()", "__iter__()", "__hash__()", "__sizeof__()",
        )))  # fmt: skip

    def pads(self, x: str) -> str:
        pairs = [(self.rng.randrange(3), self.rng.randrange(3)) for _ in range(self.rng.randrange(5))]
        kind = self.rng.randrange(6)
        if kind < 2:
            return f"[(1, 2)] * {x}.ndim"
        if kind == 2:
            return f"changing([(0, 1)] * {x}.ndim, 0, {self.one('clear', 'pop', 'grow')!r}, Array)"
        if kind == 3:
            return f"[{self.integers((1, 0))}] * {x}.ndim"
        return repr(pairs) if kind == 4 else self.integers()

    def assignment(self) -> str:
        target = self.array(new=False)
        if self.odds(0.1):
            value = f"OwnFloat32({self.one('1.5', 'Raised', '1.5, Raised', '1.5, 1e300')}{self.then()})"
            return self.one(f"{target}.fill({value})", f"_C.fill({target}, {value})", f"{target}[0] = {value}",
                            f"operator.iadd({target}, {value})", f"{target}.maximum({value})")  # fmt: skip
        value = target + self.one("", "[::-1]", "[:1]", "[..., ::2]") if self.odds(0.3) else self.values()
        kind = self.rng.randrange(8)
        if kind < 4:
            return f"{target}[{self.key()}] = {value}"
        if kind == 4:
            return f"{target}.fill({self.number()})"
        if kind == 5:
            return f"{target}.flat[{self.key()}] = {value}"
        if kind == 6:
            return f"{target}[1:] = {target}[:-1]"
        return self.one(f"del {target}[{self.key()}]", f"_C.fill({target}, {self.number()})",
                        f"_C.assign({target}, {self.array()})", f"_C.assign({target}, {target}[::-1])")  # fmt: skip

    def index(self) -> str:
        return self.keep(f"{self.array()}{self.one('', '', '.flat')}[{self.key()}]")

    def attribute(self) -> str:
        name = self.rng.choice([c for c in CALLABLES if c.startswith("NDArray.")]).partition(".")[2]
        x = self.array(new=False)
        return self.rng.choice((
            f"{x}.{name}", f"{x}.{name} = {self.thing()}", f"del {x}.{name}", f"{x}.colour = 1; del {x}.colour",
            f"_C.NDArray.colour = 1; del _C.NDArray.colour", f"{x}.__class__ = {self.one('Sub', 'Slim', 'Loud', 'int')}",
            f"{x}.flat.{self.one('shape', 'size', 'dtype', 'device', 'numpy()')}", f"vars({x})", f"dir({x})",
        ))  # fmt: skip

    def buffer(self) -> str:
        x = self.array()
        name = self.fresh()
        return self.rng.choice((
            f"{name} = memoryview({x}); {name}.tolist(); {name}[:1]",
            f"{name} = memoryview({x}); drop({x!r}); bytes({name})",
            f"{name} = memoryview({x}); {name}.release()",
            f"{name} = memoryview({x}).cast('B'); {name}[:1] = b'3'",
            f"{name} = np.asarray({x}); {name} += 1",
            f"{name} = np.array({x}, copy=False)",
            f"{name} = np.from_dlpack({x}); {name}[...] = 3",
            f"{name} = np.asarray({x}.flat)",
            f"io.BytesIO(bytes(64)).readinto({x})",
            f"bytearray({x})", f"bytes({x})", f"b'' + {x}", f"np.frombuffer({x}, 'u1')[:3]",
            f"{name} = {x}.__array_interface__; np.asarray({x})",
            f"{x}.__cuda_array_interface__", f"(ctypes.c_char * 4).from_buffer({x})",
            f"{name} = _C.array(memoryview({x}), {self.dtype()})", f"_C.from_dlpack({x})[...] = {self.number()}",
        ))  # fmt: skip

    def streams(self) -> str:
        name, x, device = self.fresh(), self.array(), self.device()
        return self.rng.choice((
            f"{name} = _C.Download({x}); {name}.wait(); {name}.wait()",
            f"{name} = _C.Download({x}); drop({x!r}); {name}.wait()[...] = 3",
            f"{name} = _C.Download(made((70, 80))); together({name}.wait, {name}.wait, {name}.wait, times=1)",
            f"{name} = _C.Download({self.thing()})",
            f"{name} = _C.Staging({self.integer()}, {device})",
            f"{name} = _C.Staging(64); np.frombuffer({name}, 'f4')[:] = 2; {name}.send({self.integers((2, 3))}, {self.dtype()})",
            f"{name} = memoryview(_C.Staging(16)); {name}[:3] = b'abc'; bytes({name})",
            f"{name} = _C.Staging(32); {name}.wait(); {name}.send((9,), 'float32')",
            f"{name} = _C.Event({device}); {name}.record(); {name}.elapsed({self.one(name, '_C.Event()', self.thing())})",
            f"_C.Graph({device}, {self.one('lambda: 3', 'Callable(Raised)', self.thing())})",
            f"{name} = _C.{self.one('Event', 'Download', 'Staging', 'Graph')}; {name}.__new__({name}, {self.thing()})",
            f"{name} = _C.Event(); {name}.__init__({self.thing()}); copy.copy({name})",
            f"{name} = {device}; {name}.{self.one('enabled', 'reason', 'synchronize', 'properties', 'memory_stats')}()",
            f"{name} = _C.cpu({self.integer()}); ({name} == {self.thing()}, hash({name}), repr({name}), {name}.is_host)",
            f"_C.cuda(index={self.integer()}).{self.one('reset_peak', 'empty_cache', 'synchronize', 'records_graphs')}",
            f"round_trip({device}, {self.rng.randrange(6)})",
        ))  # fmt: skip

    def copying(self) -> str:
        x = self.one(self.array(), self.array() + ".flat", self.array() + "._handle", "_C.Event()", self.thing())
        return self.keep(self.one(f"round_trip({x}, {self.rng.randrange(6)})", f"copy.copy({x})", f"copy.deepcopy({x})",
                         f"copy.deepcopy([{x}, {x}])", f"{x}.__reduce__()", f"pickle.dumps({x}, 5)"))  # fmt: skip

    def lifetime(self) -> str:
        name, x = self.fresh(), self.array(new=False)
        return self.rng.choice((
            f"{name} = weak({x}, lambda: ({self.action()})); drop({x!r})",
            f"{name} = weakref.proxy({x}); {name} + 1; drop({x!r})",
            f"{name} = dying(made((3,)), lambda: ({self.action()})); drop({name!r}); gc.collect()",
            f"gc.set_threshold({self.one('1', '1', '700')})",
            f"drop({x!r})", f"{name} = {x}._handle; drop({x!r}); {name}.ptr()",
            f"{name} = {x}.flat; drop({x!r}); first({name})", f"{name} = [{x}]; {name}.append({name})",
            f"{name} = iter({x}); next({name}); {name}.__setstate__({self.integer()}); next({name}); drop({x!r}); next({name})",
            f"{name} = Sub(made((2, 3))); {name}.itself = {name}; {name} @ {name}.permute((1, 0))",
        ))  # fmt: skip

    def walking(self) -> str:
        x = self.array()
        return self.rng.choice((
            f"first({x})", f"first(zip({x}, {x}))", f"{self.number()} in {x}", f"first(reversed({x}))", f"a, *b = first({x})",
            f"first(enumerate({x}.flat))", f"operator.index({x})", f"[0] * {x}", f"max(first({x}))", f"complex({x})",
            f"divmod({x}, 2)", f"{x} % 2", f"{x} // 2", f"{x} & 1", f"~{x}", f"round({x})", f"sorted(first({x}))", f"format({x}, '.2f')",
            f"range(9)[{x}]", f"np.add({x}, 1)", f"np.ones(3) + {x}", f"np.sum({x})", f"np.stack(first({x}))", f"bool({x})", f"{{{x}: 1}}",
        ))  # fmt: skip

    def huge(self) -> str:
        """What asks for more than there is, or passes 64 bits; nothing that would be walked."""
        n, m = self.one("2**31", "2**40", "2**50", "2**58"), self.one("2**31", "2**40", "2**58", "3")
        return "refused(lambda: " + self.rng.choice((
            f"wide({n}) + 1", f"wide({n}) * wide({n})", f"wide({n}).exp()", f"wide({n}).copy()", f"wide({n}) @ made((2, 2))",
            f"wide({n}, 1) @ wide(1, {m}) @ wide({n}, 1)", f"wide({n}) == 3", f"wide({n}).numpy()", f"wide({n}).astype('int64')",
            f"wide({n}).reshape(-1)[::2] + 1", f"_C.empty(({n}, {m}, 2**20))", f"wide({n}).broadcast_to(({m}, {n}, 2, 2)) + 1",
            f"made((2, 2)).pad((({n}, {m}), (1, {n})))", f"_C.Staging({n})", f"_C.Download(wide({n}))", f"bytes(wide({n}))",
            f"round_trip(wide({n}), 4)", f"repr(wide({n}))", f"wide({n}).permute((2, 0, 1)).reshape(({n} * 4 + 1,))",
            f"_C.linear_fwd(wide({n})[:, 0, :], made((2, 2)), None)", f"_C.array(wide({n}), 'bfloat16')", f"wide({n})[...] + wide({n})[::-1]",
            f"made((2, 2)).as_strided(({n}, 3), (1, 1))", f"made((2, 2)).as_strided((2, 2), ({n}, {m}))", f"wide({n}).fill(1)",
            f"_C.matmul(wide({n}), wide({n}))", f"np.asarray(wide({n})) + 1", f"wide({n}).compact()", f"wide({n}).flat[1:].copy()",
        )) + ")"  # fmt: skip

    def generic(self) -> str:
        """Any callable of the module, as it is found, with anything."""
        name = self.rng.choice(CALLABLES)
        self.reached.add(name)
        kind, _, attribute = name.partition(".")
        given = [self.rng.choice((self.array, self.thing, self.integer, self.number, self.integers, self.dtype))()
                 for _ in range(self.rng.choice((0, 1, 1, 2, 2, 3, 4, 5)))]  # fmt: skip
        if self.odds(0.1):
            given.append(self.one("dtype", "device", "shape", "axis", "x", "\ud800".encode("ascii", "replace").decode() and "y")
                         + "=" + self.thing())  # fmt: skip
        if kind == "_C":
            return self.keep(f"{name}({', '.join(given)})")
        of = {
            "NDArray": self.array(), "Device": "_C.cpu()", "Event": "_C.Event()", "Staging": "_C.Staging(48)",
            "Download": f"_C.Download({self.array()})", "Graph": self.thing(), "Handle": f"{self.array()}._handle",
            "Flat": "made((3, 4)).permute((1, 0)).flat",
        }[kind]  # fmt: skip
        if not callable(getattr(TYPES[kind], attribute)):
            return self.keep(f"{of}.{attribute}")
        if self.odds(0.2):  # unbound, perhaps on what is not its own
            return self.keep(f"TYPES[{kind!r}].{attribute}({', '.join([self.one(of, self.thing()), *given])})")
        return self.keep(f"{of}.{attribute}({', '.join(given)})")

    def threaded(self) -> str:
        """Calls at the same arrays at once, large enough that the GIL is given up."""
        name = self.fresh()
        dtype = self.one("float32", "bfloat16", "int64", "uint8")
        calls = [
            f"{name} + 1", f"{name} @ {name}", f"{name}.fill(2)", f"operator.iadd({name}, 1)", f"{name}.sum(0)", f"{name}.copy()",
            f"{name}[1:] * {name}[:-1]", f"operator.setitem({name}, slice(1, None), {name}[:-1])", f"{name}.numpy()", f"repr({name})",
            f"{name}.astype('float16')", f"_C.from_dlpack({name})", f"bytes({name})", f"drop({name!r})", f"{name}.reshape(-1).argmax()",
            f"_C.cpu().empty_cache()", f"gc.collect(0)", f"_C.array(np.asarray({name}))", f"_C.Download({name}).wait()", f"{name}.flat[3:].copy()",
            f"{name} + made((70, 71))", f"{name}.__init__(np.ones((70, 70)))",
        ]  # fmt: skip
        start = self.one(f"made((70, 70), {dtype!r})", f"made((70, 70), {dtype!r}, 'transposed')", "unmade()")
        chosen = ", ".join(f"lambda: {call}" for call in self.rng.sample(calls, 3))
        return f"{name} = {start}; together({chosen})"

    def deep_call(self) -> str:
        call = self.one(f"{self.array()} + {self.operand()}", f"_C.array({self.values()})", f"repr({self.array()})",
                        f"_C.empty({self.integers()})", f"{self.array()}[{self.key()}]", f"{self.array()}.tolist()")  # fmt: skip
        return f"deep(lambda: {call}, {self.rng.choice((5, 10, 20, 40))})"

    def draw(self) -> tuple[list[str], tuple | None]:
        """Lines, and the labels of the arrays that the last of them may change; None: any."""
        kind = self.rng.choices(KINDS, WEIGHTS)[0]
        drawn = getattr(self, kind)()
        lines, writes = drawn if isinstance(drawn, tuple) else ([drawn], () if kind in PURE else None)
        tame = not any(word in line for line in lines for word in ("lambda", "changing", "__array"))
        return lines, writes if tame else None


# kind of line -> how often
LINES: dict[str, int] = {
    "new_array": 10, "construction": 12, "lying_capsule": 1, "operator_line": 8, "in_place": 4, "elementwise_line": 5,
    "reduction": 5, "structured": 9, "whole_structured": 7, "method": 12, "assignment": 8, "index": 6, "attribute": 3,
    "buffer": 5, "streams": 5, "copying": 3, "lifetime": 4, "walking": 3, "huge": 2, "generic": 14, "threaded": 1, "deep_call": 1,
}  # fmt: skip
KINDS, WEIGHTS = list(LINES), list(LINES.values())
# What differs from run to run: threads, and what the collector comes upon.
NEVER_THE_SAME = ("together", "aside", "gc.set_threshold")
PURE = ("new_array", "operator_line", "elementwise_line", "reduction", "method", "index", "copying", "walking")
