"""The graph that a backward walks: its order, whether its arrays were written to since the forward,
and the buffers that gradients are added into. Nodes are Values (tensor.py): op, inputs,
cached_data, operands, kept, writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from needle import _C
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
                key = id(x)
                if key not in seen:
                    seen.add(key)
                    if x.inputs:
                        stack.append((x, iter(x.inputs)))
                        break
                    order.append(x)
            else:
                order.append(node)
                stack.pop()
    return order


def arrays_of(op: Any) -> list[NDArray]:
    """Return the arrays in the attributes of an op: a condition, tables, results of its forward."""
    arrays: list[NDArray] = []
    for value in vars(op).values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            x = getattr(x, "cached_data", x)
            if isinstance(x, NDArray):
                arrays.append(x)
    return arrays


WRITTEN = "was written to, or handed out for writing,"


def _is_written(data: Any, since: int) -> bool:
    if isinstance(data, tuple):
        return any(_is_written(x, since) for x in data)
    return data.written > since


_last_assignment = 0  # of the graph: the number of its write


def assigned(nodes: Sequence[Any], number: int) -> None:
    """Remember that the write of this number was an assignment to `nodes`."""
    global _last_assignment
    _last_assignment = number
    for node in nodes:
        node.assigned = number


def _assigned(x: Any) -> int:
    """The last assignment to `x`, or to a value that it is a view of."""
    last = x.assigned
    while x.op is not None and x.op.is_view:
        x = x.inputs[0]
        last = max(last, x.assigned)
    return last


def check_unchanged(node: Any) -> None:
    """Raise RuntimeError where an array that the gradient of `node` reads was written in place or
    replaced since the forward."""
    op, since = node.op, node.writes
    if _last_assignment > since:
        for i, x in enumerate(node.inputs):
            if _assigned(x) > since and not (op.is_view and shares_memory(node, x)):
                raise _changed(op, f"operand {i} was assigned to (x[...] = y)", x.cached_data)
    if op.reads_inputs:
        for i, (x, data) in enumerate(zip(node.inputs, node.operands)):
            replaced = x.cached_data is not data
            written = data.written > since if type(data) is NDArray else _is_written(data, since)
            if (replaced or written) and op.reads_input(i, node):
                if replaced:
                    raise _changed(op, f"the data of operand {i} was replaced", x.cached_data)
                raise _changed(op, f"operand {i} {WRITTEN}", data)
    if op.reads_result and _is_written(node.cached_data, since) and op.reads_output(node):
        raise _changed(op, f"the result {WRITTEN}", node.cached_data)
    for data in node.kept:
        if data.written > since:
            raise _changed(op, f"an array that the op keeps {WRITTEN}", data)


def _changed(op: Any, what: str, data: Any) -> RuntimeError:
    kind = f"{data.dtype}, shape {data.shape}" if isinstance(data, NDArray) else "a tuple"
    return RuntimeError(
        f"backward: {type(op).__name__}: {what} after the forward that its gradient belongs to "
        f"({kind}): compute the forward again, or write into a copy. A view, and each "
        "parameter of a flattened model, shares the memory of the others"
    )


def checked_order(outputs: Sequence[Any]) -> list[Any]:
    """Return the nodes that need gradients and that `outputs` depend on, inputs first. RuntimeError
    where data that a gradient reads changed since the forward."""
    order = [node for node in find_topo_sort(outputs) if node.requires_grad]
    for node in order:
        if node.op is not None:
            check_unchanged(node)
    return order


def memory_of(*values: Any) -> Iterator[int]:
    """Yield the address of the memory of each array with elements in NDArrays, Values, tuples and
    None."""
    for value in values:
        if isinstance(value, NDArray):
            if value.size:  # the address of no elements says nothing
                yield value._handle.ptr()
        elif hasattr(value, "cached_data"):
            yield from memory_of(value.cached_data)
        elif value is not None:
            yield from memory_of(*value)


# ---- where gradients are added ------------------------------------------------------------------


class Accumulators:
    """`into` of a backward: the float32 arrays into which it adds gradients. `into[i]`, of input i,
    is the gradient buffer of a flattened parameter; else an array of zeros, which then is the
    gradient of that input.

    The first access after `reset_grad()` fills a buffer with zeros. `with_add(i)` saves that for a
    kernel that can write. buffers: False where the walk is to find gradients, not to add them up.
    pending: the gradients that reached values so far, by id.
    """

    def __init__(
        self, inputs: Sequence[Any], buffers: bool = False, pending: dict[int, Any] | None = None
    ) -> None:
        self.inputs, self.buffers = inputs, buffers
        self.pending = {} if pending is None else pending
        self.own: dict[int, NDArray] = {}  # arrays that are no buffers, by input
        self._lent: dict[int, int] = {}  # by id of a parameter: the first input that has it
        self._unwritten: list[Any] = []

    def __getitem__(self, i: int) -> NDArray:
        array, add = self.with_add(i)
        if not add:
            array.fill(0)
        return array

    def with_add(self, i: int) -> tuple[NDArray, int]:
        """Return (array, add): with add 1 the caller adds the gradient. With add 0 the numbers in
        the array have no meaning: the caller writes all of them."""
        return self.all_with_add((i,))[0]

    def all_with_add(self, indices: Iterable[int]) -> list[tuple[NDArray, int]]:
        """Return (array, add) of each of these inputs."""
        found: list[tuple[NDArray, int]] = []
        for i in indices:
            x = self.inputs[i]
            if i in self.own:
                found.append((self.own[i], 1))
                continue
            has_buffer = self.buffers and x.requires_grad and x.has_grad_buffer
            if has_buffer and self._lent.setdefault(id(x), i) == i:
                found.append((x.raw_grad, int(not x.zeros_pending)))
                if x.zeros_pending:
                    x.zeros_pending = False
                    self._unwritten.append(x)
            else:  # a parameter that is an operand twice too: a kernel may add to both at once
                data = x.cached_data
                self.own[i] = _C.empty(data.shape, "float32", data.device)
                found.append((self.own[i], 0))
        return found

    def taken(self, i: int) -> NDArray | None:
        """Return the gradient that reached input i so far, in its dtype, for a kernel that adds it:
        the caller returns the sum."""
        grad = self.pending.pop(id(self.inputs[i]), None)
        if grad is None:
            return None
        data, dtype = grad.cached_data, self.inputs[i].dtype
        return data if data.dtype == dtype else data.astype(dtype)

    def reset_unwritten(self) -> None:
        """Count the arrays given out with add 0 as zeros again: the op has failed."""
        for owner in self._unwritten:
            owner.reset_grad()


def shares_memory(a: Any, *others: Any) -> bool:
    """True if a value and one of the others lie in the same memory."""
    return not set(memory_of(a)).isdisjoint(memory_of(*others))


def views_below(a: Any) -> tuple[Any, list[Any]]:
    """Return the value of the graph whose memory `a` is a view of, `a` itself where it is none, and
    the views on the way, from `a` on."""
    path = []
    while a.op is not None and not a.op.writes_input and shares_memory(a, *a.inputs):
        path.append(a)
        a = a.inputs[0]
    return a, path


def take_place(view: Any) -> Any:
    """Make a view of a constant a node of the graph, and return that constant."""
    view.op, base = view.viewed
    view.inputs, view.operands, view.viewed = (base,), [base.cached_data], None
    return base


class InTheGraph:
    """`requires_grad` of a value that has none of its own: True for a view of a constant from when
    that came into the graph, by an assignment of what has gradients. The view comes too."""

    def __get__(self, view: Any, owner: type) -> bool:
        if view is None or view.viewed is None:
            return False
        _, base = view.viewed
        if not (base.requires_grad and base.op is not None and shares_memory(view, base)):
            return False  # or it is a copy
        take_place(view)
        view.requires_grad, view.writes = True, _C.writes()
        return True
