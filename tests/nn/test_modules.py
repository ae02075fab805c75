"""Modules as they are pasted from PyTorch: containers, buffers, casts, names in files."""

import copy
import pickle

import numpy as np
import pytest
from harness import close, draw

import needle as ndl
from needle import Tensor, nn


def pasted(nn, tensor):
    """Make a module as it is written for PyTorch."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))
            lists = nn.ModuleList([nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 2)])])
            self.parts = nn.ModuleDict({"first": nn.Linear(4, 2), "rest": lists})
            self.scales = nn.ParameterList([nn.Parameter(tensor([1.0, 2.0]))])
            self.register_buffer("mask", tensor([1.0, 0.0]))
            self.register_buffer("_whole", tensor([3, 4]))
            self.register_buffer("passing", tensor([0.5, 0.25]), persistent=False)
            self.register_buffer("absent", None)

        def forward(self, x):
            y = self.body[:1](x) + self.body(x)
            first = self.parts.first(y) * self.mask + self._whole
            return first + self.parts["rest"][1][0](y) * self.scales[0] * self.passing

    return Net()


@pytest.mark.parity
def test_a_pasted_module_is_pytorchs():
    torch = pytest.importorskip("torch")
    ours, theirs = pasted(nn, ndl.tensor), pasted(torch.nn, torch.tensor)
    for walk in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        got, wanted = ([name for name, _ in getattr(net, walk)()] for net in (ours, theirs))
        assert sorted(got) == sorted(wanted), walk
        plain = walk.removeprefix("named_")
        assert len(getattr(ours, plain)()) == len(wanted)
        assert next(getattr(ours, plain)()) is getattr(ours, walk)()[0][1]
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    arrays = {name: a.numpy().T if "weight" in name else a.numpy() for name, a in state.items()}
    biases = {n: a.reshape(1, -1) for n, a in arrays.items() if n.endswith("bias")}
    ours.load_state_dict(arrays | biases)
    x = draw(0, 5, 3)
    close(ours(Tensor(x)).numpy(), theirs(torch.tensor(x, dtype=torch.float32)).detach().numpy())
    for dtype in ("bfloat16", "float16"):
        ours.to(dtype), theirs.to(getattr(torch, dtype))
        for name, value in [*theirs.named_parameters(), *theirs.named_buffers()]:
            mine = dict([*ours.named_parameters(), *ours.named_buffers()])[name]
            assert f"torch.{mine.dtype}" == str(value.dtype), name
    assert ours.float().body[0].weight.dtype == "float32" and ours.half().mask.dtype == "float16"
    assert ours.bfloat16() is ours and ours.body[0].weight.dtype == "bfloat16"


def test_next_takes_from_a_list_of_parameters_as_from_an_iterator():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    wanted = list(model.parameters())
    found = model.parameters()
    assert [p for p in found] == [p for p in found] and len(found) == 4 and found[1] is wanted[1]
    assert next(found) is wanted[0] and next(found) is wanted[1]
    assert all(p is q for p, q in zip(found, wanted[2:], strict=True))
    assert next(nn.ReLU().parameters(), None) is None and next(model.children()) is model[0]
    with pytest.raises(StopIteration):
        next(nn.ReLU().parameters())
    names = [name for name, _ in model.named_parameters()]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_containers_are_lists_and_dicts_of_modules(device):
    parts = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)]
    model = nn.Sequential(*parts)
    assert model.modules[0] is model[0] is parts[0] and model[-1] is parts[2] and len(model) == 3
    assert list(model.modules()) == [model, *parts] and list(model) == parts
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


def test_names_and_parts_that_no_module_has_are_refused():
    layer = nn.Linear(2, 2)
    for name in ("weight", "forward", "a.b"):
        with pytest.raises(KeyError, match=f"register_buffer: {name} has a dot, or is another"):
            layer.register_buffer(name, ndl.ones(2))
    layer.register_buffer("scale", ndl.ones(2))
    layer.register_buffer("scale", ndl.zeros(2))
    for part in ({"a": layer}, layer.weight):
        with pytest.raises(TypeError, match="Sequential: part 1 must be a module, but is"):
            nn.Sequential(layer, part)


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
    assert all(buffer.device == device for buffer in model.buffers())
    model.load_state_dict({"0._mask": np.array([3, 4])})
    assert model[0]._mask.tolist() == [3, 4] and model[0].table.tolist() == [0, 1, 2]
    model[0].table = ndl.zeros(2)  # still a buffer that is not saved
    assert len(model.named_buffers()) == 2 and [*model.state_dict()] == ["0._mask"]
    with pytest.raises(TypeError, match="register_buffer: x must be a Tensor, not 3"):
        model.register_buffer("x", 3)
    for place in ("int32", "bool"):
        with pytest.raises(TypeError, match="Sequential.to: dtype must be one of float32, "):
            model.to(place)
    with pytest.raises(ValueError, match="to: must name a device .* or a dtype .*, not 'float31'"):
        model.to("float31")


class Former(nn.Module):
    """Names its parts as a Sequential did."""

    def __init__(self, *modules):
        super().__init__()
        self.modules = modules


def test_state_of_former_names_is_loaded():
    parts = [nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)]
    old = Former(parts[0], nn.Residual(Former(parts[1], Former(parts[2]))))
    new = nn.Sequential(
        nn.Linear(3, 4), nn.Residual(nn.Sequential(nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 2))))
    )
    mixed = Former(
        nn.Linear(3, 4), nn.Residual(nn.Sequential(nn.Linear(4, 2), Former(nn.Linear(2, 2))))
    )
    state = old.state_dict()
    assert [*state][-1] == "modules.1.fn.modules.1.modules.0.bias"
    for model in (new, mixed, old):
        model.load_state_dict(state)
        for got, wanted in zip(model.state_dict().values(), state.values(), strict=True):
            np.testing.assert_array_equal(got.numpy(), wanted.numpy())
    with pytest.raises(ValueError, match="modules.0.weight is unexpected"):
        new.load_state_dict({**new.state_dict(), "modules.0.weight": state["modules.0.weight"]})


def test_a_module_moves_with_its_arrays(device):
    """Parameters stay the objects that they are, so that shared ones stay shared."""
    config = ndl.PythiaConfig(vocab_size=30, hidden_size=16, num_layers=1, num_heads=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.again, model.pythia = {"first": model.modules[0]}, ndl.Pythia(config)
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
    nn.flatten_parameters(model)
    with pytest.raises(ValueError, match="move the module before nn.flatten_parameters"):
        model.to(device)
