"""needle.save and needle.load: any module with its optimizer, bit for bit."""

import json

import numpy as np
import pytest
from harness import assert_same_arrays, naming

import needle as ndl
from needle import Tensor, nn, optim, safetensors
from needle.checkpoint import Checkpoint, CheckpointError
from needle.models import Pythia, PythiaConfig

X = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)


def made(width=4, dtype="float32"):
    """Make a module with a buffer, a shared parameter, a list and dtypes of two widths."""
    np.random.seed(3)
    model = nn.Sequential(
        nn.Linear(3, width, dtype=dtype), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)
    )
    model.again = model.modules[0].weight
    return model


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.reset_grad()
        loss = nn.SoftmaxLoss()(model(Tensor(X, requires_grad=False)), np.arange(5) % 2)
        loss.backward()
        optimizer.step()
    return loss.item()


def bits(model):
    return {name: array.numpy() for name, array in model.state_dict().items()}


def test_save_takes_a_module_its_optimizer_and_a_path(tmp_path):
    model, path = made(), tmp_path / "model.pt"
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 2)
    for given in (model, path), (model, None, path), (model, optimizer, str(path)):
        other = made()
        beside = optim.Adam(other.parameters()) if optimizer in given else None
        assert ndl.save(*given) == path and ndl.load(path, other, beside) == (other, beside)
        assert_same_arrays(bits(other), bits(model))
        assert beside is None or beside.t == 2
        path.unlink()
    for given in (model,), (path,), (path, model), ({}, optimizer, path):
        with pytest.raises(TypeError, match="^save: takes a module, perhaps its optimizer"):
            ndl.save(*given)
    assert not path.exists()


def test_entries_of_ones_own_leave_those_of_needle(tmp_path):
    model, path = made(), tmp_path / "model.safetensors"
    ndl.save(model, None, path, step=2, epoch=3, note={"lr": [1]})
    assert Checkpoint(path).state["note"] == {"lr": [1]} and Checkpoint(path).state["epoch"] == 3
    before = path.read_bytes()
    small = Pythia(PythiaConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=1))
    for name in ("config", "frozen", "random_state", "versions", "text_files", "content"):
        with pytest.raises(ValueError, match=f"^save: {name}: in a file that entry is needle's"):
            ndl.save_checkpoint(small, None, 0, 0.5, path, **{name: {"lr": 1}})
    assert path.read_bytes() == before


def test_dicts_of_arrays_come_back(tmp_path, device):
    model, path = made(), tmp_path / "state.pt"
    first, *rest = model.named_parameters()
    optimizer = optim.AdamW([{"params": [first], "lr": 0.5}, {"params": rest}])
    train(model, optimizer, 2)
    kept = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2, "loss": 0.5,
        "names": ["a", None, True], "model.0": {"weight": Tensor([1, 2])}, "empty": {}, "x": [],
    }  # fmt: skip
    found = ndl.load(ndl.save(kept, path), device=device)
    plain = [n for n in kept if n not in ("model", "optimizer", "model.0")]
    assert {n: found[n] for n in plain} == {n: kept[n] for n in plain}
    assert found["model.0"]["weight"].tolist() == [1, 2]
    assert isinstance(found["model.0"]["weight"], Tensor)
    other = made()
    beside = optim.AdamW(other.parameters())
    other.load_state_dict(found["model"])
    beside.load_state_dict(found["optimizer"])
    assert_same_arrays(bits(other), bits(model))
    assert beside.state_dict()["groups"] == optimizer.state_dict()["groups"]
    expected = train(model, optimizer, 2)
    assert train(other, beside, 2) == expected

    state = ndl.load(ndl.save(model.state_dict(), path))  # also into a module
    other = made()
    ndl.load(path, other)
    assert_same_arrays(bits(other), {name: a.numpy() for name, a in state.items()})
    clash = {"a.b": Tensor([1]), "a": {"b": Tensor([2]), "": Tensor([3])}}
    clash["__metadata__"] = Tensor([4])
    found = ndl.load(ndl.save(clash, path))
    assert found["__metadata__"].item() == 4
    assert (found["a.b"].item(), found["a"]["b"].item(), found["a"][""].item()) == (1, 2, 3)
    assert ndl.load(ndl.save(Tensor([4, 5]), path)).tolist() == [4, 5]
    for dtype in ("float32", "int64", "bool"):
        found = ndl.load(ndl.save({"a": np.array([0, 1, 1], dtype)}, path))["a"]
        assert (found.tolist(), found.dtype) == ([0, 1, 1], dtype)
    for wrong, said in (
        ({"net": nn.Linear(2, 2)}, "net is a Linear: save .* or what its state_dict"),
        ({"a": [1, {2}]}, "a.1 is a set"), (np.ones(2), "it is a ndarray"),
        ({"a": {1: 2, "1": 3}}, "a has the key 1: keys must be texts"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"save: {said}"):
            ndl.save(wrong, path)


def test_a_refused_load_changes_nothing(tmp_path):
    path = ndl.save(made(), None, tmp_path / "model.safetensors")
    with_adam = made()
    optimizer = optim.Adam(with_adam.parameters())
    adam = ndl.save(with_adam, optimizer, tmp_path / "adam.safetensors")
    wide, narrow = made(5), nn.Linear(3, 4)
    misfits = [
        (path, wide, None, r"does not fit the module: .*1.weight has shape \[4\], not \[5\]"),
        (path, narrow, None, "weight is missing; bias is missing; 0.bias is unknown"),
    ]
    for file, kind, some, message in [
        (path, optim.Adam, 6, "holds the state of no optimizer, not of Adam"),
        (adam, optim.SGD, 6, "holds the state of Adam, not of SGD"),
        (adam, optim.Adam, 2, "the optimizer's state cannot be used: Adam"),
    ]:
        module = made()
        misfits.append((file, module, kind(module.parameters()[:some]), message))
    for file, module, beside, message in misfits:
        for p in module.parameters():
            p.data = p.data * 0 + 7
        before = bits(module)
        with pytest.raises(CheckpointError, match=message) as error:
            ndl.load(file, module, beside)
        assert str(file) in str(error.value)
        assert_same_arrays(bits(module), before)


def test_without_a_module_the_class_must_be_registered(tmp_path):
    path = ndl.save(made(), None, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no registered class: make one, and ndl.load\(path"):
        ndl.load(path)
    config = PythiaConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=1, max_seq_len=8)
    model = Pythia(config)
    saved = ndl.save(model, optim.SGD(model.parameters()), tmp_path / "pythia.safetensors")
    again, optimizer = ndl.load(saved)
    assert isinstance(again, Pythia) and isinstance(optimizer, optim.SGD)
    assert_same_arrays(bits(again), bits(model))
    assert ndl.load_checkpoint(saved)[2] == 0
    with pytest.raises(TypeError, match="give both"):
        ndl.load(saved, optimizer=optimizer)
    with pytest.raises(TypeError, match="the given one has its own"):
        ndl.load(saved, again, device=ndl.cpu())


def test_names_and_parameters_that_are_not_the_modules(tmp_path):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.optimizer = nn.Linear(2, 2)

    with pytest.raises(ValueError, match="save: optimizer.weight: in a file that name"):
        ndl.save(Wrapped(), None, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="save: the optimizer's parameter"):
        ndl.save(made(), optim.SGD(made().parameters()), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_dlpack_of_a_flipped_array_reaches_back_from_its_first_element():
    host = np.arange(6, dtype=np.float32)
    x = ndl.from_dlpack(host[::-1]).cached_data
    np.testing.assert_array_equal(x.as_strided((3,), (-2,)).numpy(), [5, 3, 1])
    for stride in (1, -6):
        with pytest.raises(ValueError, match="reach outside the array's memory of 24 bytes"):
            x.as_strided((2,), (stride,))
    x[:3] = x[4:1:-1]  # they overlap
    np.testing.assert_array_equal(host, [0, 1, 2, 3, 2, 1])


def test_the_checked_file_is_the_one_read(tmp_path):
    """Another process may take the file's name between the check and the read of its tensors."""
    path, model, again = tmp_path / "model.safetensors", nn.Linear(3, 4), nn.Linear(3, 4)
    checkpoint = Checkpoint(ndl.save(model, None, path))
    ndl.save(nn.Linear(3, 4), None, path)
    checkpoint.restore_into(again)
    assert_same_arrays(bits(again), bits(model))


def test_header_whose_offsets_contradict_shapes_is_refused(tmp_path):
    path, shapes = tmp_path / "a.safetensors", {"a": [2], "b": [3]}
    for offsets, said in [
        ([(0, 8), (8, 20)], None),
        ([(12, 20), (0, 12)], None),  # in another order than the header's
        ([(0, 8), (12, 24)], "b contradict"),  # a hole
        ([(0, 8), (4, 16)], "b contradict"),  # an overlap
        ([(0, 8), (8, 16)], "b contradict"),  # too few bytes for its shape
        ([(0, 12), (12, 24)], "a contradict"),  # too many
        ([(4, 12), (12, 24)], "a contradict"),
        ([(0, 8), (8, -20)], "b has no proper"),
    ]:
        places = zip(shapes.items(), offsets)
        header = json.dumps(
            {n: {"dtype": "F32", "shape": shape, "data_offsets": at} for (n, shape), at in places}
        ).encode()
        length = offsets[-1][1] if said and "contradict" in said else 20
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(length))
        with naming(offsets), open(path, "rb") as file:
            if said is not None:
                with pytest.raises(safetensors.FileError, match=said):
                    safetensors.read_header(file)
                continue
            entries = safetensors.read_header(file)[1]
            assert {entry.name: entry.shape for entry in entries} == {"a": (2,), "b": (3,)}
            assert [entry.offset - 8 - len(header) for entry in entries] == sorted(
                begin for begin, _ in offsets
            )


def test_header_of_any_length_ends_at_a_multiple_of_eight_bytes_and_is_read():
    """Where safetensors' own writer ends it, so that maps of the tensors are aligned. Of 640, 896,
    1,152 and 1,408 bytes too, lengths that begin as a pickle does."""
    begins = set()
    for letters in (*range(1, 9), *range(520, 1400, 8)):
        data = safetensors.pack({"n" * letters: np.arange(3.0)})
        assert int.from_bytes(data[:8], "little") % 8 == 0 and len(data) % 8 == 0
        assert [*safetensors.unpack(data, "the bytes")] == ["n" * letters]
        begins.add(data[:2])
    assert {b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"} <= begins
