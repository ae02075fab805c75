"""The graph that a backward walks: its order, and whether its arrays were written to since the
forward, and the threads at its leaves. Nodes are Values (autograd.py): op, inputs, cached_data,
operands, kept, writes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from needle._C import NDArray


def find_topo_sort(node_list: Sequence[Any]) -> list[Any]:
    """Return all nodes that `node_list` depends on, and itself, in post-order: inputs before the
    results computed from them, first input first. Works on graphs of any depth.

    >>> a, b = ndl.Tensor([1]), ndl.Tensor([2])
    >>> c = a * b
    >>> [node is x for node, x in zip(ndl.autograd.find_topo_sort([c + a]), (a, b, c))]
    [True, True, True]
    """
    order: list[Any] = []
    seen: set[int] = set()
    for root in node_list:
        if id(root) in seen:
            continue
        seen.add(id(root))
        stack = [(root, iter(root.inputs))]
        while stack:
            node, rest = stack[-1]
            for x in rest:
                if id(x) not in seen:
                    seen.add(id(x))
                    stack.append((x, iter(x.inputs)))
                    break
            else:
                order.append(node)
                stack.pop()
    return order


def arrays_of(op: Any) -> list[NDArray]:
    """Return the arrays in the attributes of an op: a condition, tables, results of its forward."""
    found: list[Any] = []
    for value in vars(op).values():
        found += value if isinstance(value, (tuple, list)) else (value,)
    found = [x.cached_data if hasattr(x, "cached_data") else x for x in found]
    return [x for x in found if isinstance(x, NDArray)]


def _written(data: Any) -> int:
    return max(_written(x) for x in data) if isinstance(data, tuple) else data.written


def check_unchanged(node: Any) -> None:
    """Raise RuntimeError where an array that the gradient of `node` reads was written in place or
    replaced since the forward."""
    op, since = node.op, node.writes

    def refuse(what: str, data: Any) -> None:
        kind = f"{data.dtype}, shape {data.shape}" if isinstance(data, NDArray) else "a tuple"
        raise RuntimeError(
            f"backward: {type(op).__name__}: {what} after the forward that its gradient belongs to "
            f"({kind}): compute the forward again, or write into a copy. A view, and each "
            "parameter of a flattened model, shares the memory of the others"
        )

    def check(name: str, data: Any) -> None:
        if _written(data) > since:
            refuse(f"{name} was written to, or handed out for writing,", data)

    op.check_unchanged()
    for i, x in enumerate(node.inputs):
        if x.assigned > since:
            refuse(f"operand {i} was assigned to (x[...] = y)", x.cached_data)
    if op.reads_inputs:
        for i, (x, data) in enumerate(zip(node.inputs, node.operands)):
            if x.cached_data is not data:
                refuse(f"the data of operand {i} was replaced", x.cached_data)
            check(f"operand {i}", data)
    if op.reads_result:
        check("the result", node.cached_data)
    for data in node.kept:
        check("an array that the op keeps", data)


def checked_order(outputs: Sequence[Any]) -> list[Any]:
    """Return the nodes that need gradients and that `outputs` depend on, inputs first. RuntimeError
    where data that a gradient reads changed since the forward."""
    order = [node for node in find_topo_sort(outputs) if node.requires_grad]
    for node in order:
        if node.op is not None:
            check_unchanged(node)
    return order


def memory_of(*values: Any) -> Iterator[int]:
    """Yield the address of the memory of each array in NDArrays, Values, tuples and None."""
    for value in values:
        if isinstance(value, NDArray):
            yield value._handle.ptr()
        elif hasattr(value, "cached_data"):
            yield from memory_of(value.cached_data)
        elif value is not None:
            yield from memory_of(*value)


# ---- threads -------------------------------------------------------------------------------------

_walked: dict[int, int] = {}  # the leaves that backward() is at, by id: their thread
_walk_ended = threading.Condition()


@contextlib.contextmanager
def alone(order: list[Any]) -> Iterator[None]:
    """Wait until no other thread's backward is at a leaf of `order`. Threads that share none do not
    wait for each other: they may be ranks."""
    leaves, me = {id(node) for node in order if node.op is None}, threading.get_ident()
    with _walk_ended:
        _walk_ended.wait_for(lambda: all(_walked.get(leaf, me) == me for leaf in leaves))
        mine = leaves - _walked.keys()
        _walked.update(dict.fromkeys(mine, me))
    try:
        yield
    finally:
        with _walk_ended:
            for leaf in mine:
                del _walked[leaf]
            _walk_ended.notify_all()
