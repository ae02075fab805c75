"""Modules as they are written for PyTorch: containers, buffers, casts, names in files."""

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
from harness import close, draw

import needle as ndl
from needle import Tensor, nn


def test_containers_are_lists_and_dicts_of_modules(device):
    parts = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)]
    model = nn.Sequential(*parts)
    assert model.modules[0] is model[0] is parts[0] and model[-1] is parts[2] and len(model) == 3
    assert list(model.modules()) == [model, *parts] and list(model) == parts
    found = model.parameters()  # a list, from which next() takes as from an iterator
    assert len(found) == 4 and [found[0], found[1]] == [next(found), next(found)]
    assert next(nn.ReLU().parameters(), None) is None and next(model.children()) is model[0]
    x = draw(1, 4, 2)
    hidden = np.maximum(x @ parts[0].weight.numpy() + parts[0].bias.numpy(), 0)
    close(model[:2](Tensor(x)).numpy(), hidden)
    model.append(nn.Linear(2, 5))
    assert model(Tensor(x)).shape == (4, 5) and model == model and {model: 1}[model] == 1
    assert nn.Sequential() != nn.Sequential() and nn.Sequential()(x) is x
    model[3] = nn.Linear(2, 1)
    assert model(Tensor(x)).shape == (4, 1) and len(model.parameters()) == 6

    names = nn.ModuleDict({"wte": nn.Embedding(5, 2)}, h=nn.ModuleList(parts))
    assert names.wte is names["wte"] and [*names] == ["wte", "h"] and "h" in names
    names.wte = nn.Embedding(7, 2)
    assert names["wte"].weight.shape == (7, 2) and len(names.parameters()) == 5
    with pytest.raises(AttributeError, match="no module 'wpe'; it has .'wte', 'h'."):
        names.wpe  # noqa: B018
    names.buffers_beside = nn.ParameterList([nn.Parameter(draw(2, 3))])
    assert names.to(device) is names and names.eval().h[0].training is False
    assert all(p.device == device for p in [*names.parameters(), names.buffers_beside[0]])
    for copied in (copy.deepcopy(names), pickle.loads(pickle.dumps(names))):
        assert copied.state_dict().keys() == names.state_dict().keys()
        close(copied.h[0].weight.numpy(), names.h[0].weight.numpy())


def test_buffers_move_and_are_saved(device):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("_mask", Tensor([1.0, 0.0]))  # Tensor has a gradient
            self.register_buffer("table", ndl.arange(3), persistent=False)

    model = nn.Sequential(Masked())
    assert not model[0]._mask.requires_grad and len(model.buffers()) == 2
    assert [*model.state_dict()] == ["0._mask"] and not model.parameters()
    model.to(device, "float16")
    assert (model[0]._mask.dtype, model[0].table.dtype) == ("float16", "int64")
    for cast, dtype in ("bfloat16", "bfloat16"), ("float", "float32"), ("half", "float16"):
        assert getattr(model, cast)() is model and model[0]._mask.dtype == dtype
    assert all(buffer.device == device for buffer in model.buffers())
    model.load_state_dict({"0._mask": np.array([3, 4])})
    assert model[0]._mask.tolist() == [3, 4] and model[0].table.tolist() == [0, 1, 2]
    model[0].table = ndl.zeros(2)  # still a buffer that is not saved
    assert len(model.named_buffers()) == 2 and [*model.state_dict()] == ["0._mask"]
    for name, value, error, said in (
        ("x", 3, TypeError, "register_buffer: x must be a Tensor, not 3"),
        ("forward", ndl.ones(2), KeyError, "register_buffer: forward has a dot, or is another"),
        ("a.b", ndl.ones(2), KeyError, "register_buffer: a.b has a dot, or is another"),
    ):
        with pytest.raises(error, match=said):
            model.register_buffer(name, value)
    with pytest.raises(TypeError, match="Sequential: part 1 must be a module, but is"):
        nn.Sequential(model, {"a": model})
    with pytest.raises(TypeError, match="Sequential: part 1 must be a module, but is type"):
        nn.Sequential(model, nn.ReLU)
    for place in ("int32", "bool"):
        with pytest.raises(TypeError, match="Sequential.to: dtype must be one of float32, "):
            model.to(place)
    with pytest.raises(ValueError, match="to: must name a device .* or a dtype .*, not 'float31'"):
        model.to("float31")


def test_a_module_moves_with_its_arrays(device):
    """Parameters stay the objects that they are, so that shared ones stay shared."""
    config = ndl.PythiaConfig(vocab_size=30, hidden_size=16, num_layers=1, num_heads=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.again, model.pythia = {"first": model.modules[0]}, ndl.Pythia(config)
    model.scales = OrderedDict(a=nn.Parameter([2.0]))
    x, ids, parameters = ndl.Tensor(draw(0, 3, 4)), [[1, 2, 3]], model.parameters()
    (model(x) ** 2).sum().backward()
    model.eval()
    before = model(x).numpy(), model.pythia(ids)[0].numpy(), parameters[0].grad.numpy()
    assert model.to(device) is model and model.pythia.device == device
    arrays = [*model.state_dict().values(), *model.pythia._rotary, parameters[0].grad.cached_data]
    assert all(array.device == device for array in arrays)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    for old, new in zip(before, (model(x.to(device)), model.pythia(ids)[0], parameters[0].grad)):
        close(new.numpy(), old)
    close(model.cpu().pythia(ids)[0].numpy(), before[1], 0)
    assert copy.deepcopy(model).to("bfloat16").pythia.config.dtype == "bfloat16"
    nn.flatten_parameters(model)
    with pytest.raises(ValueError, match="move the module before nn.flatten_parameters"):
        model.to(device)


def test_a_constant_does_not_take_the_place_of_a_parameter():
    layer, values = nn.Linear(2, 3), Tensor(draw(1, 2, 3))
    with pytest.raises(TypeError, match="Linear.weight: is a Parameter, which a Tensor cannot"):
        layer.weight = values
    with ndl.no_grad(), pytest.raises(TypeError, match="Linear.bias: is a Parameter"):
        layer.bias = layer.bias * 2
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    layer.weight, layer.bias = nn.Parameter(values), None
    close(layer.weight.numpy(), draw(1, 2, 3))
    layer.weight = layer.weight * 2  # of an inner loop, in the graph
    layer(ndl.ones(1, 2)).sum().backward()


def test_parameter_grad_takes_a_tensor_of_its_shape():
    layer = nn.Linear(2, 3)
    for flat in (None, nn.flatten_parameters):
        kept = flat and flat(layer)
        with pytest.raises(TypeError, match="Parameter.grad: must be a Tensor, not ndarray"):
            layer.weight.grad = np.ones((2, 3))
        with pytest.raises(ValueError, match=r"the shape must be \(2, 3\), but is \(3,\)"):
            layer.weight.grad = ndl.ones(3)
        layer.weight.grad = ndl.ones(2, 3)
        close(layer.weight.grad.numpy(), np.ones((2, 3)))
    assert float(kept.grad.sum()) == 6


def test_attributes_named_as_methods_of_needle_do_no_harm():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.saved, self.neighbours = nn.Linear(2, 2), [], ndl.ones(2, 2)

    graph = Graph()
    graph.load_state_dict(graph.state_dict())
    assert len(nn.flatten_parameters(graph).names) == 2
