"""Data that changes between forward and backward: the forward's gradient, or RuntimeError."""

import io

import numpy as np
import pytest
from gradients import GRADIENTS, inputs_of
from harness import naming

import needle as ndl
from needle import _C, Tensor, autograd, nn, ops, optim
from needle.autograd import graph


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_operand_that_changed_is_refused_where_the_gradient_reads_it(case, monkeypatch):
    """Each gradient is the one of the forward, or backward() says why there is none. Nothing is
    refused if NaN in operands or result changes no gradient."""
    arrays = inputs_of(case)

    def gradients(changed=None, value=np.nan):
        tensors = [Tensor(a) for a in arrays]
        result = case.op(ops, *tensors)
        seed = Tensor(np.random.default_rng(0).standard_normal(result.shape))
        data = [x.cached_data for x in (*tensors, result)]
        if changed is not None and 0 not in data[changed].strides:
            data[changed].fill(value)
        try:
            result.backward(seed)
        except RuntimeError as error:
            assert "backward: " in str(error) and "after the forward" in str(error)
            assert all(x.grad is None for x in tensors)
            return None
        return [x.grad.numpy() for x in tensors]

    right = gradients()
    with monkeypatch.context() as unchecked:
        unchecked.setattr(graph, "check_unchanged", lambda node: None)
        seen = [gradients(i) for i in range(len(arrays) + 1)]
    same = [all(map(np.array_equal, got, right)) for got in seen]
    for i in range(len(arrays) + 1):
        got = gradients(i, 0.37)
        assert got is None or all(map(np.array_equal, got, right))
        if all(same[:-1]) if i < len(arrays) else same[-1]:
            assert gradients(i) is not None


def readinto(x):
    io.BytesIO(bytes(48)).readinto(x.cached_data)


WRITES = {
    "setitem": lambda x: x.cached_data.__setitem__((0, 0), 5),
    "fill": lambda x: x.cached_data.fill(1),
    "flat": lambda x: x.cached_data.permute((1, 0)).flat.__setitem__(0, 3),
    "view": lambda x: x.detach().cached_data[1:].fill(2),
    "operator": lambda x: x.cached_data.__imul__(2),
    "assign": lambda x: _C.assign(x.cached_data, _C.array(1.0)),
    "an op in place": lambda x: _C.bias_bwd(
        _C.array(np.ones((2, 4))), x.cached_data[0].reshape((4,)), None
    ),
    "an op on a copy": lambda x: _C.bias_bwd(
        _C.array(np.ones((2, 3))), x.cached_data.permute((1, 0))[0].reshape((3,)), None
    ),
    "buffer": readinto,
    "DLPack": lambda x: _C.from_dlpack(x.cached_data),
    "interface": lambda x: x.cached_data.__array_interface__,
    "data": lambda x: setattr(x, "data", Tensor(np.ones((3, 4)))),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_way_to_write_is_counted(write):
    x, y = Tensor(np.ones((3, 4))), Tensor(np.full((3, 4), 2))
    for first, second, place in ((x, y, 0), (y, x, 1)):
        product = ops.multiply(first, second)
        WRITES[write](x)
        match = rf"backward: EWiseMul: (the data of )?operand {place} was .*float32, shape \(3, 4\)"
        with pytest.raises(RuntimeError, match=match):
            product.sum().backward()
        assert x.grad is None and y.grad is None
    product = x * y  # after the write all is well
    product.backward()
    np.testing.assert_array_equal(y.grad.numpy(), x.numpy())
    product.backward()  # and reading is no write
    [x.numpy(), np.asarray(x), str(x), x.cached_data.tolist(), x.cached_data[0] + 1, x.item]
    data = x.cached_data
    held = [
        np.asarray(data),
        memoryview(data),
        np.array(data),
        bytes(memoryview(data)),
        bytes(data),
    ]
    product.backward()
    del held
    product.backward()


def side_operands():
    """(name, op of a Tensor, its shape, what it is given beside that)"""
    rng = np.random.default_rng(0)

    def arrays(*shape):
        return _C.array(rng.standard_normal(shape))

    cos, sin = (_C.array(table) for table in nn.rotary_tables(4, 4))
    packed = (1, 4, 2, 3, 8)
    condition = _C.array(np.tri(4), "bool")
    ids, places = _C.array([0, 2, 2, 1], "int32"), np.array([0, 2, 2, 1])
    factor, numbers = np.array([2.0], np.float32), [np.array(2.0), _C.array(2.0)]
    wide, square, row = (Tensor(arrays(*shape)) for shape in ((16, 48), (16, 16), (16,)))
    norms, rest = [row] * 4, [wide, Tensor(np.ones(48)), *[square, row] * 3]
    layer, head = nn.Attention(16, 2), Tensor(arrays(5, 3))
    yield "where", lambda x: ops.where(condition, x, 0.0), (4, 4), [condition]
    yield "rotary", lambda x: ops.rotary(x, cos, sin, 2), packed, [cos, sin]
    yield "qkv_attention", lambda x: ops.qkv_attention(x, cos, sin), packed, [cos, sin]
    yield "layer", lambda x: ops.layer(x, *norms, *rest, 2, cos, sin), (1, 4, 16), [cos, sin]
    yield "recompute", lambda x: nn.recompute(layer, x, (cos, sin)), (1, 4, 16), [cos, sin]
    yield "embedding", lambda x: ops.embedding(ids, x), (3, 2), [ids]
    yield "cross_entropy", lambda x: ops.cross_entropy(x, ids), (4, 3), [ids]
    yield "linear_cross_entropy", lambda x: ops.linear_cross_entropy(x, head, ids), (4, 5), [ids]
    yield "get_item", lambda x: x[places] + x[ids], (3, 2), [places, ids]
    yield "index_select", lambda x: ops.index_select(x, 0, places), (3, 2), [places]
    yield "multiply", lambda x: x * factor, (3, 1), [factor]
    for number in numbers:
        yield "scalar", lambda x, by=number: ops.multiply_scalar(x, by), (3,), [number]


def test_arrays_given_beside_an_operand_are_watched():
    """RuntimeError, or the gradient of the forward."""
    for name, op, shape, kept in side_operands():
        for operand in kept:
            with naming(name, type(operand).__name__):
                before = _C.array(operand).numpy()
                leaf = Tensor(np.random.default_rng(1).standard_normal(shape))
                result = op(leaf)
                result.backward()
                right, leaf.grad = leaf.grad.numpy(), None
                operand[...] = operand * 0
                try:
                    result.backward()
                    np.testing.assert_array_equal(leaf.grad.numpy(), right)
                except RuntimeError as error:
                    assert "was written to, or handed out for writing," in str(error)
                operand[...] = before
                op(leaf).backward()  # after the write all is well


class Powers(autograd.TensorTupleOp):
    """x^2 and x^4, by whose own values their gradient is computed."""

    def compute(self, x):
        square = _C.multiply(x, x)
        return square, _C.multiply(square, square)

    def gradient(self, out_grad, node):
        square, fourth = map(Tensor.from_ndarray, node.cached_data)
        return (out_grad[0] * square + 2 * out_grad[1] * fourth) * 2 / node.inputs[0]


@pytest.mark.parametrize("element", [0, 1])
def test_a_write_to_one_element_of_a_tuple_is_counted(element):
    result = Powers()(Tensor(np.full(3, 2.0)))
    outcome = result[0] + result[1]
    outcome.backward()
    result.cached_data[element].fill(7)
    with pytest.raises(RuntimeError, match="backward: Powers: the result was written to"):
        outcome.backward()


def test_writes_of_other_libraries_are_not_seen():
    """The gradient is that of the new values, as from_dlpack and backward document."""
    shared = np.ones(3, np.float32)
    x = ndl.from_dlpack(shared)
    x.requires_grad = True
    y = (x * x).sum()
    shared[:] = 5
    y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [10, 10, 10])
    for said in (ndl.from_dlpack.__doc__, Tensor.backward.__doc__):
        assert "not see" in " ".join(said.split())


def test_an_optimizer_step_between_forward_and_backward():
    """A graph that is kept reads the weights, which the step has changed."""
    model = nn.Linear(3, 2)
    adam = optim.AdamW(model.parameters(), lr=0.1)
    loss = model(Tensor(np.ones((4, 3)), requires_grad=False)).sum()
    loss.backward()
    loss.backward()  # the gradients' own buffer is no operand
    before = [p.grad.numpy() for p in model.parameters()]
    adam.step()
    with pytest.raises(RuntimeError, match="backward: LinearOp: operand 1 was"):
        loss.backward()
    for p, grad in zip(model.parameters(), before):  # nothing was added
        np.testing.assert_array_equal(p.grad.numpy(), grad)
