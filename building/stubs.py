"""Write the stubs of a built package: of the C core, of the methods of Tensor, of needle.ops.

PYTHONPATH=FOLDER python building/stubs.py FOLDER/needle

The signatures are those of the objects. What the core does not say, the types of parameters and
results, is below by their names, or by CLASS.METHOD.NAME where one differs.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from needle import _C, ops
from needle.autograd import operators
from needle.ops.spellings import words_of

SUBCLASSABLE = 1 << 10  # Py_TPFLAGS_BASETYPE
SHAPE, OPTIONAL = "int | Sequence[int]", "NDArray | None"
PARAMETERS = {
    "array": "NDArray", "axes": "Sequence[int]", "axis": "Axis", "block": SHAPE, "bytes": "int",
    "cluster": f"{SHAPE} | None", "code": "bytes", "cooperative": "bool", "copy": "bool | None",
    "device": "Device | None", "dim": "int", "dl_device": "tuple[int, int] | None", "dtype": "Any",
    "element": "object", "grid": SHAPE, "handle": "Handle | None", "index": "int",
    "indices": "Any", "keepdims": "bool", "key": "Index", "max_version": "tuple[int, int] | None",
    "name": "str", "obj": "Any", "offset": "int", "on": "bool",
    "other": "Operand", "owner": "Module", "parameters": "Parameters", "shape": SHAPE,
    "shared": "int", "sl": "slice", "step": "Callable[[], object]", "stream": "int | None",
    "strides": "Sequence[int] | None", "symbol": "str", "threads": "int", "value": "Operand",
    "flags": "int", "arguments": "Any", "side": "bool", "mod": "None",
    "NDArray.pad.axes": "Sequence[Sequence[int]]", "NDArray.flip.axes": "Axis",
    "NDArray.index_select.axis": "int", "NDArray.fill.value": "Scalar",
    "NDArray.__init__.other": "Any", "NDArray.joined.other": "NDArray",
    "NDArray.to.device": "Device", "Event.elapsed.other": "Event",
    "Module.__init__.device": "Device",
    "Parameters.__init__.parameters": "Sequence[tuple[Any, ...]]",
    "Parameters.pack.arguments": "tuple[Any, ...]", "NDArray.__setitem__.value": "Any",
    "Device.__eq__.value": "object",
}  # fmt: skip
RESULTS = {  # of NDArray's methods, and of the functions, NDArray where nothing else is said
    "None": "__call__ __init__ __setitem__ cuda_init cuda_reset empty_cache fill record replay "
    "reset_peak synchronize Event.wait PinnedBuffer.wait",
    "bool": "__bool__ __contains__ done enabled is_compact is_contiguous is_host records_graphs "
    "runs_kernels sync_each_op Device.__eq__",
    "int": "__hash__ __int__ __len__ blocks data_ptr generation index nbytes ndim ptr side_stream "
    "size stream writes written",
    "float": "__float__ elapsed",
    "str": "dtype name",
    "bytes": "pack",
    "slice": "process_slice",
    "memoryview": "__buffer__",
    "Device": "cpu cuda device",
    "Handle": "_handle",
    "Any": "tolist",
    "CapsuleType": "__dlpack__",
    "np.ndarray": "__array__ numpy",
    "bool | int | float": "item",
    "str | None": "reason",
    "NDArray | None": "joined",
    "NDArray | Flat": "flat",
    "tuple[int, ...]": "shape strides",
    "tuple[int, int]": "__dlpack_device__",
    "dict[str, int]": "limits memory_stats",
    "dict[str, Any]": "__array_interface__ __cuda_array_interface__ build_info properties",
    "list[Device]": "all_devices",
    "Iterator[NDArray]": "__iter__",
    "dict[str, tuple[str, tuple[tuple[str, str, str, str], ...]]]": "table",
}
RESULT = {name: kind for kind, names in RESULTS.items() for name in names.split()}
# Python gives each type these, or they serve copying and pickling.
IMPLIED = {
    "__new__", "__repr__", "__str__", "__doc__", "__module__", "__copy__", "__deepcopy__",
    "__reduce__", "__delitem__", "__array_ufunc__", "__weakref__", "__release_buffer__",
    "Device.__lt__", "Device.__le__", "Device.__gt__", "Device.__ge__", "Device.__ne__",
}  # fmt: skip
# How ops take operands and give results, by the modes of ops.def.
OPERANDS = {"F64": "float", "I64": "int", "OPT": OPTIONAL, "IO_OPT": OPTIONAL, "KEPT": "object"}
OUTPUTS = {"OUT": "NDArray", "NEW": "NDArray", "KEEP": "object"}
HEAD = '''"""Written by building/stubs.py."""
# mypy: disable-error-code="misc, override"

import builtins
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, SupportsIndex, TypeVar, final, overload

import numpy as np
from typing_extensions import CapsuleType

'''
CORE = """from needle.backend_ndarray.array_methods import Flat

Scalar = bool | int | float | np.number | np.bool_
Operand = NDArray | np.ndarray | list[Any] | Scalar
Axis = int | Sequence[int] | None
Index = SupportsIndex | slice | None | Any  # the last is for ..., and tuples of these

class CudaError(RuntimeError): ...
class CudaFatalError(CudaError): ...
"""
USED = """from needle._C import Device, NDArray
from needle.autograd.tensor import Tensor, TensorTuple
from needle.backend_ndarray import Axes
from needle.ops.layer import Cached
from needle.ops.order import TopK

"""
METHODS = """Result = TypeVar("Result")
ops: Any

class Size(int):
    shape: tuple[int, ...]
    def __call__(self, dim: int | None = None) -> Any: ...

class Operators(Generic[Result]):
"""
EMPTY = inspect.Parameter.empty
BY_WORD = inspect.Parameter.KEYWORD_ONLY


class Text(str):
    """The text of an annotation, which is printed without quotation marks."""

    __repr__ = str.__str__


def written(
    name: str,
    signature: inspect.Signature,
    kind_of: Callable[[inspect.Parameter], str],
    result: str,
) -> str:
    """Return the line of a function. A default that is no plain value is `...`."""
    parameters = []
    for p in signature.parameters.values():
        if p.name not in ("self", "cls"):
            p = p.replace(annotation=Text(kind_of(p)))
        if not isinstance(p.default, (type(None), bool, int, str, type)):  # EMPTY is a type
            p = p.replace(default=Text("..."))
        parameters.append(p)
    signature = inspect.Signature(parameters, return_annotation=Text(result))
    return f"def {name}{signature}: ...\n"


# ---- the core ------------------------------------------------------------------------------------


def call(self, grid, block, /, *arguments, shared=0, cluster=None, cooperative=False):
    """Have the signature of Kernel.__call__, which does not say it."""


def function_of(name: str, value: Any, owner: str = "") -> str:
    """Return the line of a function or method of the core, its types by names."""
    full = f"{owner}.{name}"

    def kind_of(parameter: inspect.Parameter) -> str:
        return PARAMETERS.get(f"{full}.{parameter.name}") or PARAMETERS[parameter.name]

    signature = inspect.signature(call if name == "__call__" else value)
    if inspect.isclass(value) or inspect.isbuiltin(value) and owner:
        first = inspect.Parameter(
            "self" if inspect.isclass(value) else "cls", inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        signature = signature.replace(parameters=[first, *signature.parameters.values()])
    return written(name, signature, kind_of, RESULT.get(full) or RESULT.get(name, "NDArray"))


def core_class(kind: type, name: str) -> Iterator[str]:
    yield "\n" if kind.__flags__ & SUBCLASSABLE else "\n@final\n"
    yield f"class {name}:\n"
    members = vars(kind) | ({"__init__": kind} if "__new__" in vars(kind) else {})
    for member, value in members.items():
        if value is None or {member, f"{name}.{member}"} & IMPLIED:
            continue
        if inspect.isdatadescriptor(value):
            result = RESULT.get(f"{name}.{member}") or RESULT.get(member, "NDArray")
            yield f"    @property\n    def {member}(self) -> {result}: ...\n"
            continue
        if isinstance(value, type(dict.__dict__["fromkeys"])):
            value = getattr(kind, member)
            yield "    @classmethod\n"
        yield f"    {function_of(member, value, name)}"


def op_of(name: str, kind: str, operands: tuple) -> str:
    """Return the line of an op of ops.def."""
    modes = {field: mode for mode, field, _, _ in operands}
    outputs = [OUTPUTS[mode] for mode in modes.values() if mode in OUTPUTS] or ["None"]
    result = f"tuple[{', '.join(outputs)}]" if outputs[1:] else outputs[0]
    other = "Operand" if kind in ("EW2", "CMP") else "NDArray"
    kind_of = lambda p: OPERANDS.get(modes[p.name], other)
    return written(name, inspect.signature(getattr(_C, name)), kind_of, result)


def core() -> Iterator[str]:
    table = _C.table()
    yield HEAD + CORE
    yield from core_class(type(_C.empty(())._handle), "Handle")
    named = {name: getattr(_C, name) for name in dir(_C) if name[0] != "_"}
    for name, value in named.items():
        if inspect.isclass(value) and not issubclass(value, Exception):
            yield from core_class(value, name)
    yield "\n"
    for name, value in named.items():
        if not inspect.isclass(value):
            yield op_of(name, *table[name]) if name in table else function_of(name, value)


# ---- needle.ops and the methods of Tensor --------------------------------------------------------


def spelled(function: Callable[..., Any]) -> Iterator[inspect.Signature]:
    """Yield the signatures of a function: its own with the other words of what has a default, and
    with those of what has none in its place."""
    raw = inspect.unwrap(function)
    own, others = inspect.signature(raw).parameters, words_of(raw)
    optional = {other: word for other, word in others.items() if own[word].default is not EMPTY}
    more = [own[word].replace(name=other, kind=BY_WORD) for other, word in optional.items()]
    rest = [p for p in own.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    plain = [p for p in own.values() if p not in rest]
    for other, word in [("", ""), *(one for one in others.items() if one[0] not in optional)]:
        at = next((i for i, p in enumerate(plain) if p.name == word), len(plain))
        after = [
            p.replace(kind=BY_WORD, name=other if p.name == word else p.name) for p in plain[at:]
        ]
        yield inspect.signature(raw).replace(parameters=[*plain[:at], *after, *more, *rest])


def text_of(annotation: Any, default: str = "Any") -> str:
    if annotation is EMPTY:
        return default
    return annotation if isinstance(annotation, str) else annotation.__name__


def overloads(name: str, function: Callable[..., Any], is_method: bool = False) -> Iterator[str]:
    """Yield the lines of a function of needle.ops, or of a method, which by default returns a
    Tensor."""
    signatures = [*spelled(function)]
    for signature in signatures:
        if is_method:
            own, *rest = signature.parameters.values()
            own = own.replace(name="self", annotation=EMPTY)
            signature = signature.replace(parameters=[own, *rest])
        if signatures[1:]:
            yield "@overload\n"
        returned = text_of(signature.return_annotation, "Tensor" if is_method else "Any")
        yield written(name, signature, lambda p: text_of(p.annotation), returned)


def functions() -> Iterator[str]:
    """Yield the stub of needle/ops."""
    yield HEAD + USED
    for name in ops.__all__:
        value = getattr(ops, name)
        if inspect.isclass(value):
            yield f"from {value.__module__} import {name} as {name}\n"
        else:
            yield from overloads(name, value)
    yield f"\n__all__ = {ops.__all__!r}\n"


def methods() -> Iterator[str]:
    """Yield the stub of needle/autograd/operators.py. Types that are methods too are qualified."""
    kind = operators.Operators
    hidden = [name for name in vars(kind) if isinstance(getattr(builtins, name, None), type)]
    returned = re.compile(r"\bTensor\b(?!.*->)")
    qualified = re.compile(rf"(?<!def )\b({'|'.join(hidden)})\b")
    lines = [f"{name}: {annotation}\n" for name, annotation in kind.__annotations__.items()]
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, property):
            if inspect.isfunction(value.fget):
                result = text_of(inspect.signature(value.fget).return_annotation)
            else:
                result = RESULT[name]
            lines += ["@property\n", f"def {name}(self) -> {result}: ...\n"]
        elif inspect.isfunction(value):
            lines += overloads(name, value, is_method=True)
    yield HEAD + USED + METHODS
    for line in lines:
        yield "    " + returned.sub("Result", qualified.sub(r"builtins.\1", line))


STUBS = {"autograd/operators.pyi": methods, "ops/__init__.pyi": functions, "_C.pyi": core}

if __name__ == "__main__":
    for name, lines in STUBS.items():  # _C.pyi is the last: make looks at its time
        Path(sys.argv[1], name).write_text("".join(lines()))
