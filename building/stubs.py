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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from needle import _C, ops
from needle.autograd import operators
from needle.ops.spellings import words_of

HEAD = '"""Written by building/stubs.py."""\n\n'
SUBCLASSABLE = 1 << 10  # Py_TPFLAGS_BASETYPE
SHAPE, OPTIONAL = "int | Sequence[int]", "NDArray | None"
PARAMETERS = {
    "array": "NDArray", "axes": "Sequence[int]", "axis": "Axis", "block": SHAPE, "bytes": "int",
    "cluster": f"{SHAPE} | None", "code": "bytes", "cooperative": "bool", "copy": "bool | None",
    "device": "Device | None", "dim": "int", "dl_device": "tuple[int, int] | None", "dtype": "Any",
    "element": "object", "grid": SHAPE, "handle": "Handle | None", "index": "int",
    "indices": "Any", "keepdims": "bool", "key": "Index", "max_version": "tuple[int, int] | None",
    "name": "str", "obj": "Any", "offset": "int", "on": "bool", "operands": "Sequence[Any]",
    "other": "Operand", "owner": "Module", "parameters": "Parameters", "shape": SHAPE,
    "shared": "int", "sl": "slice", "step": "Callable[[], object]", "stream": "int | None",
    "strides": "Sequence[int] | None", "symbol": "str", "threads": "int", "value": "Operand",
    "flags": "int", "arguments": "Any", "side": "bool",
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
# Python gives each type these, or they serve copying and pickling; Device alone has its ==.
IMPLIED = {
    "__new__", "__repr__", "__str__", "__doc__", "__module__", "__copy__", "__deepcopy__",
    "__reduce__", "__delitem__", "__array_ufunc__", "__weakref__", "__release_buffer__",
}  # fmt: skip
HOMES = {"Any": "typing", "Axes": "needle.backend_ndarray", "Sequence": "collections.abc"}
ORDER = {"__lt__", "__le__", "__gt__", "__ge__", "__ne__"}
UNARY = "__neg__ __pos__ __abs__ __invert__ __iter__ __len__ __hash__ __bool__ __int__".split()
CORE = """from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex, final

import numpy as np
from typing_extensions import CapsuleType

from needle.backend_ndarray.array_methods import Flat

Scalar = bool | int | float | np.number | np.bool_
Operand = NDArray | np.ndarray | list[Any] | Scalar
Axis = int | Sequence[int] | None
Index = SupportsIndex | slice | None | Any  # the last is for ..., and tuples of these

class CudaError(RuntimeError): ...
class CudaFatalError(CudaError): ...
"""


class Text(str):
    """The text of an annotation, which is printed without quotation marks."""

    __repr__ = str.__str__


def written(name: str, signature: inspect.Signature, indent: str = "", end: str = "") -> str:
    """Return the line of a function. A default that is no plain value is `...`."""
    plain = (type(None), bool, int, str)
    parameters = [
        p.replace(default=p.empty if p.default is p.empty else Text("..."))
        if not isinstance(p.default, plain)
        else p
        for p in signature.parameters.values()
    ]
    return f"{indent}def {name}{signature.replace(parameters=parameters)}: ...{end}\n"


# ---- the core ------------------------------------------------------------------------------------


def typed(function: Any, owner: str, name: str) -> inspect.Signature:
    """Return the signature of a function of the core with types by name."""
    signature = inspect.signature(function)
    parameters = [
        p
        if p.name in ("self", "type", "module") and owner
        else p.replace(
            annotation=Text(PARAMETERS.get(f"{owner}.{name}.{p.name}") or PARAMETERS[p.name])
        )
        for p in signature.parameters.values()
    ]
    result = RESULT.get(f"{owner}.{name}") or RESULT.get(name, "NDArray")
    return signature.replace(parameters=parameters, return_annotation=Text(result))


def core_class(kind: type, name: str) -> Iterator[str]:
    yield "\n" if kind.__flags__ & SUBCLASSABLE else "\n@final\n"
    yield f"class {name}:\n"
    for member, value in vars(kind).items():
        if member in IMPLIED or value is None or name == "Device" and member in ORDER:
            continue
        result = RESULT.get(f"{name}.{member}") or RESULT.get(member, "NDArray")
        if inspect.isdatadescriptor(value):
            yield f"    @property\n    def {member}(self) -> {result}: ...\n"
        elif member == "__init__":
            yield written(member, init_of(kind, name), "    ")
        elif type(value).__name__ == "wrapper_descriptor":
            yield operator_of(name, member, result)
        elif isinstance(value, classmethod) or type(value).__name__ == "classmethod_descriptor":
            cls = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
            signature = typed(getattr(kind, member), name, member)
            signature = signature.replace(parameters=[cls, *signature.parameters.values()])
            yield "    @classmethod\n" + written(member, signature, "    ").replace("cls, /", "cls")
        elif callable(value):
            yield written(member, typed(value, name, member), "    ")
    if "__init__" not in vars(kind) and "__new__" in vars(kind):
        yield written("__init__", init_of(kind, name), "    ")


def init_of(kind: type, name: str) -> inspect.Signature:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    made = typed(kind, name, "__init__")
    return made.replace(parameters=[own, *made.parameters.values()])


def operator_of(owner: str, member: str, result: str) -> str:
    """Return the line of an operator, whose own signature is Python's."""
    words = {
        "__getitem__": "key: Index, /", "__setitem__": "key: Index, value: Any, /",
        "__buffer__": "flags: int, /",
        "__call__": f"grid: {SHAPE}, block: {SHAPE}, /, *arguments: Any, shared: int = 0, "
        f"cluster: {SHAPE} | None = None, cooperative: bool = False",
    }  # fmt: skip
    other = "object" if owner == "Device" else "Operand"
    given = words.get(member, "" if member in UNARY else f"value: {other}, /")
    ignored = "override" if member in ("__eq__", "__ne__") else "misc" if member in ORDER else ""
    ignored = ignored and f"  # type: ignore[{ignored}]"
    return f"    def {member}(self{', ' if given else ''}{given}) -> {result}: ...{ignored}\n"


def op_of(name: str, entry: tuple) -> str:
    """Return the line of an op of ops.def."""
    kind, operands = entry
    both = kind in ("EW2", "CMP")
    types = {"F64": "float", "I64": "int", "OPT": OPTIONAL, "IO_OPT": OPTIONAL, "KEPT": "object"}
    made = {"OUT": "NDArray", "NEW": "NDArray", "KEEP": "object"}
    given = ", ".join(
        f"{field}: {'Operand' if both else types.get(mode, 'NDArray')}"
        for mode, field, _, _ in operands
        if mode not in made
    )
    outputs = [made[mode] for mode, *_ in operands if mode in made]
    result = f"tuple[{', '.join(outputs)}]" if outputs[1:] else (outputs or ["None"])[0]
    return f"def {name}({given}) -> {result}: ...\n"


def core() -> Iterator[str]:
    table = _C.table()
    yield HEAD + CORE
    yield from core_class(type(_C.empty(())._handle), "Handle")
    for name in dir(_C):
        value = getattr(_C, name)
        if inspect.isclass(value) and not issubclass(value, Exception):
            yield from core_class(value, name)
    yield "\n"
    for name in dir(_C):
        value = getattr(_C, name)
        if name[0] != "_" and not inspect.isclass(value):
            is_op = name in table
            yield op_of(name, table[name]) if is_op else written(name, typed(value, "", name))


# ---- needle.ops and the methods of Tensor --------------------------------------------------------


def spelled(function: Callable[..., Any]) -> Iterator[inspect.Signature]:
    """Yield the signatures of a function: its own with the other words of what has a default, and
    with those of what has none in its place."""
    raw = inspect.unwrap(function)
    signature, others = inspect.signature(raw), words_of(raw)
    own = dict(signature.parameters)
    by_word = inspect.Parameter.KEYWORD_ONLY
    more = [
        own[word].replace(name=other, kind=by_word)
        for other, word in others.items()
        if own[word].default is not inspect.Parameter.empty
    ]
    rest = [p for p in own.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    plain = [p for p in own.values() if p not in rest]
    yield signature.replace(parameters=[*plain, *more, *rest])
    for other, word in others.items():
        if own[word].default is inspect.Parameter.empty:
            at = [p.name for p in plain].index(word)
            after = [own[word].replace(name=other), *plain[at + 1 :]]
            after = [p.replace(kind=by_word) for p in after]
            yield signature.replace(parameters=[*plain[:at], *after, *more, *rest])


def annotated(signature: inspect.Signature, change: Callable[[str], str]) -> inspect.Signature:
    """Return a signature whose annotations are texts, changed; Any where there was none."""

    def text(annotation: Any) -> Text:
        given = "Any" if annotation is inspect.Parameter.empty else annotation
        return Text(change(given if isinstance(given, str) else given.__name__))

    parameters = [
        p if p.name == "self" else p.replace(annotation=text(p.annotation))
        for p in signature.parameters.values()
    ]
    return signature.replace(
        parameters=parameters, return_annotation=text(signature.return_annotation)
    )


def overloads(
    name: str, signatures: Iterable[inspect.Signature], indent: str = "", end: str = ""
) -> str:
    lines = [written(name, signature, indent, end) for signature in signatures]
    mark = f"{indent}@overload\n" if lines[1:] else ""
    return "".join(mark + line for line in lines)


def imports_for(text: str, functions: Iterable[Any]) -> str:
    """Return the imports of the names in annotations, from where functions have them."""
    lines = set()
    for function in functions:
        names = getattr(inspect.unwrap(function), "__globals__", {})
        for name in set(re.findall(r"\b[A-Za-z_]\w*\b", text)) & names.keys():
            value = names[name]
            if inspect.ismodule(value) and value.__name__ == "numpy":
                lines.add("import numpy as np")
            elif isinstance(value, type) or name in HOMES:
                lines.add(f"from {HOMES.get(name) or value.__module__} import {name}")
    lines.discard("from needle.autograd.operators import Size")
    return "\n".join(sorted(lines)) + "\n"


def functions() -> str:
    lines, made = [], []
    for name in ops.__all__:
        value = getattr(ops, name)
        if inspect.isclass(value):
            lines.append(f"from {value.__module__} import {name} as {name}\n")
        else:
            made.append(value)
            changed = [annotated(s, str) for s in spelled(value)]
            lines.append(overloads(name, changed))
    text = "".join(lines)
    names = ", ".join(f'"{name}"' for name in ops.__all__)
    head = "from typing import overload\n" + imports_for(text, made)
    return f"{HEAD}{head}\n{text}\n__all__ = [{names}]\n"


def methods() -> str:
    """Return the stub of needle/autograd/operators.py. Names of types that are methods too are
    qualified."""
    kind = operators.Operators
    hidden = [name for name in vars(kind) if isinstance(getattr(builtins, name, None), type)]

    def change(text: str) -> str:
        return re.sub(rf"(?<![\w.])({'|'.join(hidden)})(?!\w)", r"builtins.\1", text)

    def of_tensor(text: str) -> str:
        return change(re.sub(r"\bTensor\b", "Result", text))

    lines, made = [], [kind._updated]
    for name, annotation in kind.__annotations__.items():
        lines.append(f"    {name}: {change(annotation)}\n")
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, property):
            result = inspect.signature(value.fget).return_annotation
            result = "Any" if result is inspect.Signature.empty else change(result)
            lines.append(f"    @property\n    def {name}(self) -> {result}: ...\n")
        elif inspect.isfunction(value):
            made.append(value)
            variants = []
            for s in spelled(value):
                first, *rest = s.parameters.values()
                own = first.replace(name="self", annotation=first.empty)
                result = "Result" if "<locals>" in value.__qualname__ else s.return_annotation
                if value.__module__ != operators.__name__ and s.return_annotation is not s.empty:
                    result = s.return_annotation
                variants.append(annotated(s.replace(parameters=[own, *rest]), change))
                variants[-1] = variants[-1].replace(return_annotation=Text(of_tensor(str(result))))
            end = "  # type: ignore[override]" if name in ("__eq__", "__ne__") else ""
            lines.append(overloads(name, variants, "    ", end))
    for name, value in vars(operators).items():
        if inspect.isfunction(value) and value.__module__ == operators.__name__:
            made.append(value)
            lines.append(overloads(name, [annotated(inspect.signature(value), str)]))
    text = "".join(lines)
    head = "import builtins\nfrom typing import Generic, TypeVar, overload\n"
    head += imports_for(text, made)
    size = "class Size(int):\n    shape: tuple[int, ...]\n    def __call__(self, dim: int | None = "
    size += "None) -> Any: ...\n"
    return (
        f'{HEAD}{head}\nResult = TypeVar("Result")\nops: Any\n\n{size}\n'
        f"class Operators(Generic[Result]):\n{text}"
    )


if __name__ == "__main__":
    package = Path(sys.argv[1])
    (package / "autograd" / "operators.pyi").write_text(methods())
    (package / "ops" / "__init__.pyi").write_text(functions())
    (package / "_C.pyi").write_text("".join(core()))  # the last: make looks at its time
