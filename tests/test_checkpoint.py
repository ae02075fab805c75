"""Checkpoints: what goes in comes out, bit for bit; whatever is not whole is refused, by name."""

import dataclasses
import errno
import io
import json
import os
import pickle
import resource
import signal

import numpy as np
import pytest
from harness import DEVICES, assert_same_arrays, device_of, naming

import needle as ndl
from needle import models, nn, optim
from needle.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    proven_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from needle.models.pythia import Pythia, PythiaConfig
from needle.safetensors import Entry, pack, read_header, unpack
from needle.training import evaluate
from needle.training import export as shell

CONFIG = PythiaConfig(
    vocab_size=53, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=12, rotary_pct=0.5
)
DTYPES = ["float32", "bfloat16"]


def made(dtype="float32", device=None):
    np.random.seed(7)
    model = Pythia(dataclasses.replace(CONFIG, dtype=dtype), device=device)
    flat = nn.flatten_parameters(model)
    return model, optim.AdamW(flat, lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)


def step(model, optimizer, seed):
    """A training step on two micro-batches drawn from `seed`; the loss of the second."""
    optimizer.reset_grad()
    for drawn in np.random.RandomState(seed).randint(0, CONFIG.vocab_size, (2, 3, 13)):
        _, loss = model(drawn[:, :-1], drawn[:, 1:])
        loss.backward()
    optimizer.step()
    return float(loss.numpy())


def weights(model):
    return {name: p.cached_data.numpy() for name, p in model.named_parameters()}


@pytest.fixture
def read(monkeypatch):
    """The names of the tensors that are read from checkpoints."""
    names, tensor = [], Entry.read

    def recording(self, device):
        names.append(self.name)
        return tensor(self, device)

    monkeypatch.setattr(Entry, "read", recording)
    return names


@pytest.fixture
def saved(tmp_path):
    model, optimizer = made()
    step(model, optimizer, 0)
    return save_checkpoint(model, optimizer, 3, 1.25, tmp_path / "model.safetensors", step=1)


# ---- round trips ------------------------------------------------------------------------------


def forms(model):
    """Return each form that an optimizer can be made in, by name."""
    named = model.named_parameters()
    biases = [p for name, p in named if name.endswith("bias")]
    rest = [p for name, p in named if not name.endswith("bias")]
    yield "parameters", model.parameters
    yield "named", model.named_parameters
    yield "reversed", lambda: list(reversed(named))
    yield "flat", lambda: nn.flatten_parameters(model)
    yield "flat, all decayed", lambda: nn.flatten_parameters(model, lambda name, p: True)
    part = model.layers[1]  # whose own names of its parameters are shorter than the model's
    yield "a part", part.parameters
    yield "a part, flat", lambda: nn.flatten_parameters(part)
    yield (
        "groups of a part",
        lambda: [
            {"params": part.attention.parameters(), "weight_decay": 0.0, "lr": 3e-3},
            {"params": part.mlp.parameters()},
        ],
    )
    yield (
        "groups",
        lambda: [
            {"params": biases, "weight_decay": 0.0, "lr": 3e-3},
            {"params": rest, "weight_decay": 0.2},
        ],
    )

    def frozen(then):
        def parameters():
            for name, p in named:
                p.requires_grad = "dense_4h_to_h" not in name and "embed" not in name
            return then()

        return parameters

    yield "flat, some frozen", frozen(lambda: nn.flatten_parameters(model))
    yield "some frozen", frozen(lambda: [p for p in model.parameters() if p.requires_grad])
    yield "list over flat", lambda: nn.flatten_parameters(model) and model.parameters()
    for name in "embed_in", "layers.1":
        part = dict(model.named_modules())[name]
        yield (
            f"list over flat {name}",
            lambda part=part: nn.flatten_parameters(part) and model.parameters(),
        )


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
def test_optimizer_of_every_form_continues_bit_for_bit(tmp_path, kind, device_name):
    """Saves, loads and continues with the form that the file has, as the README does."""
    device = device_of(device_name)
    options = {"momentum": 0.9} if kind is optim.SGD else {"beta1": 0.8}
    for dtype in DTYPES:
        for number, form in enumerate(dict(forms(Pythia(CONFIG))), 1):
            if form.startswith("groups") and kind is not optim.AdamW:
                continue
            np.random.seed(number)
            model = Pythia(dataclasses.replace(CONFIG, dtype=dtype), device=device)
            parameters = dict(forms(model))[form]()
            optimizer = kind(parameters, lr=1e-2, weight_decay=0.1, **options)
            for seed in range(3):
                step(model, optimizer, seed)
            path = save_checkpoint(model, optimizer, 2, 0.1, tmp_path / f"{dtype} {number}")
            before = np.random.get_state()[1].copy()
            again, loaded, *rest = load_checkpoint(path, device)
            np.testing.assert_array_equal(np.random.get_state()[1], before)
            assert rest == [2, 0.1] and again.config == model.config
            assert_same_arrays(weights(model), weights(again))
            assert (loaded.flat is None) == (optimizer.flat is None), form
            trained = [[p.requires_grad for p in m.parameters()] for m in (model, again)]
            assert trained[0] == trained[1], form
            named = dict(again.named_parameters())
            assert all(named[name] is p for name, p in zip(loaded.names, loaded.params)), form
            for seed in range(3, 6):
                assert step(model, optimizer, seed) == step(again, loaded, seed), (form, dtype)
                if optimizer.flat is not None:
                    norms = [optim.grad_norm(o.flat)[0].item() for o in (optimizer, loaded)]
                    assert norms[0] == norms[1], (form, dtype)
            for one, its in ((model, optimizer), (again, loaded)):
                its.reset_grad()  # zeros in a buffer are a gradient, None is not
                one.final_layer_norm(ndl.ones(3, 16, device=device, dtype=dtype)).sum().backward()
                its.step()
            assert_same_arrays(weights(model), weights(again))
            assert repr(optimizer) == repr(loaded)
            if optimizer.names == loaded.names:  # those of a part are shorter
                ours, theirs = optimizer.state_dict(), loaded.state_dict()
                arrays = [state.pop("arrays") for state in (ours, theirs)]
                assert_same_arrays(*({k: v.numpy() for k, v in of.items()} for of in arrays))
                assert ours == theirs, form


def test_a_checkpoint_describes_itself(saved, tmp_path):
    assert repr(Checkpoint(saved)) == f"Checkpoint({saved}, step 1, loss 1.2500, AdamW)"
    bare = save_checkpoint(made()[0], None, 0, float("nan"), str(tmp_path / "bare.pkl"))
    assert repr(Checkpoint(bare)) == f"Checkpoint({bare}, loss nan, no optimizer)"
    assert load_checkpoint(bare)[1] is None and bare.read_bytes()[8:9] == b"{"


def test_tokenizer_of_the_run_comes_before_one_beside_the_file(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    path = save_checkpoint(made()[0], None, 0, 1.0, checkpoint_path(folder, 1))
    assert load_checkpoint(path)[0].tokenizer is None
    for size, place in (280, folder), (290, folder.parent):
        tokenizer = ndl.data.train_tokenizer(iter(["the cat sat on the mat"] * 9), size)
        tokenizer.save(str(place / "tokenizer.json"))
        assert load_checkpoint(path)[0].tokenizer.to_str() == tokenizer.to_str()


def test_tokenizer_is_in_the_checkpoint_of_its_model(tmp_path):
    """Before one that lies beside it, wherever the file goes, and for load_tokenizer too."""
    model, optimizer = made()
    beside, own = (
        ndl.data.train_tokenizer(iter([text] * 9), 280) for text in ("one two", "the cat sat")
    )
    beside.save(str(tmp_path / "tokenizer.json"))
    model.tokenizer = own
    save_checkpoint(model, optimizer, 0, 1.0, tmp_path / "a.safetensors")
    for read in (
        load_checkpoint(tmp_path / "a.safetensors")[0].tokenizer,
        ndl.load(tmp_path / "a.safetensors")[0].tokenizer,
        Pythia.from_pretrained(tmp_path / "a.safetensors").tokenizer,
        ndl.data.load_tokenizer(tmp_path / "a.safetensors"),
    ):
        assert type(read) is ndl.data.Tokenizer and read.to_str() == own.to_str()
        assert read.encode("the cat").ids == own.encode("the cat").ids
    model.tokenizer = None
    save_checkpoint(model, optimizer, 0, 1.0, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="b.safetensors: holds no tokenizer: give a tokenizer.jso"):
        ndl.data.load_tokenizer(tmp_path / "b.safetensors")


def test_the_model_alone_is_read_without_the_optimizer(saved, read, tmp_path):
    """Readers of weights only: the export and evaluation."""
    model, optimizer, _, _ = Checkpoint(saved).restore()
    assert len(read) == 3 * len(weights(model)) and optimizer is not None
    for get in (
        lambda: Checkpoint(saved).restore_model(),
        lambda: evaluate.load_model(saved)[0],
        lambda: shell.export_checkpoint(saved, tmp_path / "there"),
    ):
        read.clear()
        made = get()
        assert read == list(weights(model))
        if isinstance(made, Pythia):
            assert_same_arrays(weights(made), weights(model))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_cpu_to_cuda_and_back(tmp_path, dtype):
    cuda = device_of("cuda")
    model, optimizer = made(dtype)
    step(model, optimizer, 0)
    save_checkpoint(model, optimizer, 0, 1.0, tmp_path / "a")
    there, there_optimizer, _, _ = load_checkpoint(tmp_path / "a", cuda)
    assert there.device == cuda
    assert_same_arrays(weights(model), weights(there))
    assert np.isfinite(step(there, there_optimizer, 1))
    save_checkpoint(there, there_optimizer, 0, 1.0, tmp_path / "b")
    assert_same_arrays(weights(there), weights(load_checkpoint(tmp_path / "b")[0]))


def test_state_and_random_numbers_come_back(tmp_path):
    model, optimizer = made()
    np.random.seed(5)
    np.random.standard_normal(3)  # an odd number: half of a pair is kept
    path = save_checkpoint(
        model,
        optimizer,
        1,
        float("nan"),
        tmp_path / "a",
        step=9,
        data={"epoch": 1, "batch": 4},
        schedule={"lr": 0.1},
    )
    expected = np.random.standard_normal(5)
    checkpoint = Checkpoint(path)
    assert checkpoint.state["step"] == 9
    assert checkpoint.state["data"] == {"epoch": 1, "batch": 4}
    assert checkpoint.state["schedule"] == {"lr": 0.1}
    assert checkpoint.state["versions"]["numpy"] == np.__version__
    assert np.isnan(checkpoint.state["loss"])
    checkpoint.restore_random_state()
    np.testing.assert_array_equal(np.random.standard_normal(5), expected)


def test_missing_file_is_named_and_devices_have_names(saved, tmp_path):
    for read in load_checkpoint, ndl.load, Checkpoint, lambda path: ndl.load(path, made()[0]):
        with pytest.raises(FileNotFoundError, match="none.safetensors: cannot be read: No such"):
            read(tmp_path / "none.safetensors")
        with pytest.raises(CheckpointError):
            read(tmp_path / "none.safetensors")
    folder = tmp_path / "hf"
    Pythia(CONFIG).save_pretrained(folder)
    for make in (
        lambda device: load_checkpoint(saved, device)[0],
        lambda device: ndl.load(saved, device=device),
        lambda device: Checkpoint(saved).restore_model(device),
        lambda device: Pythia.from_pretrained(folder, device=device),
        lambda device: evaluate.load_model(folder, device=device)[0],
        lambda device: evaluate.load_model(saved, device=device)[0],
        lambda device: Pythia(CONFIG, device=device),
        lambda device: ndl.backend_ndarray.empty((2,), device=device),
        lambda device: ndl.ones(2, device=device),
        lambda device: ndl.randint(3, (2,), device=device),
        lambda device: ndl.Tensor([1], device=device),
        lambda device: ndl.Tensor(ndl.Tensor([1]), device=device),
        lambda device: nn.Linear(2, 2, device=device),
        lambda device: nn.Transformer(8, 8, 1, num_head=1, dim_head=8, device=device),
        lambda device: nn.Embedding(3, 2, device=device),
    ):
        for device in "cpu", ndl.cpu():
            make(device)
        with pytest.raises(
            ValueError, match="device must be auto, cpu, cuda or cuda:INDEX, not 'gp"
        ):
            make("gpu")
        with pytest.raises(TypeError, match="device: must be a Device"):
            make(3)


def test_empty_name_is_not_the_current_folder(tmp_path, monkeypatch, capsys):
    model, optimizer = made()
    monkeypatch.chdir(tmp_path)
    save_checkpoint(model, optimizer, 0, 1.0, "m.safetensors")
    model.save_pretrained("theirs")
    before = sorted(tmp_path.rglob("*"))
    message = r"^an empty name \(''\) of a file or folder: the current folder is '\.'$"
    for use in [
        lambda: load_checkpoint(""),
        lambda: save_checkpoint(model, optimizer, 0, 1.0, ""),
        lambda: ndl.save(model, optimizer, ""),
        lambda: ndl.load("", model),
        lambda: models.from_pretrained(""),
        lambda: model.save_pretrained(""),
    ]:
        with pytest.raises(CheckpointError, match=message):
            use()
    for words in [
        ("export", "", "new"),
        ("export", "m.safetensors", ""),
        ("import", "", "new"),
        ("import", "theirs", ""),
    ]:
        assert shell.main([*words, "--overwrite"]) == 1
        assert f"needle {words[0]}: an empty name ('')" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_of_a_header_alone(tmp_path):
    from safetensors.numpy import save_file

    save_file({"nothing": np.zeros((0, 3), np.float32)}, tmp_path / "a.safetensors")
    with open(tmp_path / "a.safetensors", "rb") as file:
        metadata, entries = read_header(file)
        assert metadata == {} and [(e.name, e.shape) for e in entries] == [("nothing", (0, 3))]
        assert file.read() == b""


def test_the_package_safetensors_opens_it(tmp_path):
    from safetensors import safe_open

    for dtype in DTYPES:
        model, optimizer = made(dtype)
        path = save_checkpoint(model, optimizer, 0, 1.0, tmp_path / "a.safetensors")
        with naming(dtype), safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            assert "embed_in.weight" in names
            assert any(name.startswith("optimizer.") for name in names)
            assert json.loads(file.metadata()["state"])["config"]["hidden_size"] == 16
            if dtype == "float32":
                name = "layers.1.attention.dense.weight"
                np.testing.assert_array_equal(file.get_tensor(name), weights(model)[name])


# ---- damage -----------------------------------------------------------------------------------


def refused(path):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_bytes_of_arrays_of_any_strides():
    values = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    for array in (values, values.T, values[::-1], values[:, ::2], np.asfortranarray(values)):
        found = unpack(pack({"before": np.ones(3, "f4"), "array": array}), "the bytes")
        np.testing.assert_array_equal(found["array"], array)
        np.testing.assert_array_equal(found["before"], [1, 1, 1])


def test_every_kind_of_truncation(saved):
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    lengths = {
        *range(20),
        *range(header - 10, header + 10),
        *range(0, len(whole), 997),
        len(whole) - 1,
        len(whole) - 4,
    }
    for length in sorted(lengths):
        saved.write_bytes(whole[:length])
        refused(saved)
    saved.write_bytes(whole + b"\0")
    assert "truncated or altered" in refused(saved)
    saved.write_bytes(whole)
    load_checkpoint(saved)


def test_one_flipped_bit_anywhere(saved):
    whole = bytearray(saved.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    random = np.random.RandomState(0)
    places = [
        *range(0, 120 * 8, 3),
        *random.randint(0, header * 8, 150),
        *random.randint(header * 8, len(whole) * 8, 150),
        len(whole) * 8 - 1,
    ]
    for place in places:
        whole[place // 8] ^= 1 << (place % 8)
        saved.write_bytes(whole)
        refused(saved)
        whole[place // 8] ^= 1 << (place % 8)
    saved.write_bytes(whole)
    load_checkpoint(saved)


def test_file_of_many_read_blocks_is_checked_to_its_last_byte(tmp_path):
    module = nn.Linear(3 << 10, 3 << 10)  # 36 MiB; blocks have 16
    path = ndl.save(module, None, tmp_path / "large.safetensors")
    again, _ = ndl.load(path, nn.Linear(3 << 10, 3 << 10))
    np.testing.assert_array_equal(again.weight.numpy(), module.weight.numpy())
    size = path.stat().st_size
    for place in (size // 3, 2 * size // 3, size - 1):
        with open(path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
            file.flush()
            assert "checksum" in refused(path)
            file.seek(place)
            file.write(bytes([byte]))
    Checkpoint(path)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("pickle-was-run",))


def test_a_pickle_is_refused_and_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "old.pkl"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps({"model": Bomb()}, protocol))
        assert protocol < 2 or "pickle" in refused(path)
        refused(path)
    assert not (tmp_path / "pickle-was-run").exists()


def test_foreign_files(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "foreign"
    for content in (
        b"",
        b"hello",
        b"more than eight bytes of text\n",
        b"PK\3\4" + bytes(99),
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (9).to_bytes(8, "little") + b'{"a":"b"}',
    ):
        path.write_bytes(content)
        refused(path)
    save_file({"a": np.zeros(3, np.float32)}, path)
    assert "not one of needle's checkpoints" in refused(path)
    save_file({"a": np.zeros(3, np.float32)}, path, metadata={"format": "pt", "checksum": "0"})
    assert "not one of needle's checkpoints" in refused(path)
    path.unlink()
    assert "No such file" in refused(path)
    assert "no good checkpoint" in refused(tmp_path)


def test_all_misfits_are_listed_in_one_error(tmp_path, monkeypatch):
    model, optimizer = made()
    model.config = dataclasses.replace(CONFIG, vocab_size=54, num_layers=3)
    monkeypatch.setattr(PythiaConfig, "misfits", lambda config, module: [])
    path = save_checkpoint(model, optimizer, 0, 1.0, tmp_path / "a")
    message = refused(path)
    assert "embed_in.weight has shape [53, 16], not [54, 16]" in message
    assert "layers.2.mlp.dense_h_to_4h.weight is missing" in message


# ---- writing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_file(saved, monkeypatch, at):
    before = saved.read_bytes()
    model, optimizer = made()
    limits, said = resource.getrlimit(resource.RLIMIT_FSIZE), "File too large"
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if at == "write":
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    else:
        monkeypatch.setattr(os, "fsync", full)
        said = "No space left on device"
    try:
        with pytest.raises(CheckpointError, match=f"cannot be written: {said}") as caught:
            save_checkpoint(model, optimizer, 0, 1.0, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(saved) in str(caught.value)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    model, optimizer = made()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(model, optimizer, 0, 1.0, tmp_path / "file" / "a.safetensors")


def test_only_registered_models_can_be_saved(tmp_path):
    with pytest.raises(TypeError, match="models.register knows, as Pythia is, not Linear"):
        save_checkpoint(nn.Linear(2, 2), None, 0, 1.0, tmp_path / "a")
    assert not list(tmp_path.iterdir())


# ---- the folder of a run ----------------------------------------------------------------------


def test_the_two_newest_stay_and_damaged_ones_are_passed_over(tmp_path):
    model, optimizer = made()
    for number in (2, 9, 10, 100):
        save_checkpoint(model, optimizer, 0, 1.0, checkpoint_path(tmp_path, number), step=number)
    (tmp_path / "step_x.safetensors").write_text("not ours")
    prune_checkpoints(tmp_path, 100)
    assert list_checkpoints(tmp_path) == [checkpoint_path(tmp_path, n) for n in (100, 10)]
    for number in (101, 105, 106):
        save_checkpoint(model, optimizer, 0, 1.0, checkpoint_path(tmp_path, number), step=number)
    prune_checkpoints(tmp_path, 106, following=6)
    left = [106, 105, 101, 100]  # 100 is proven, 101 next; 10 was when 100 was not
    assert list_checkpoints(tmp_path) == [checkpoint_path(tmp_path, n) for n in left]
    assert proven_checkpoint(tmp_path, 106, 6) == checkpoint_path(tmp_path, 100)
    assert proven_checkpoint(tmp_path, 107, 6) == checkpoint_path(tmp_path, 101)
    assert proven_checkpoint(tmp_path, 105, 6) is None
    checkpoint_path(tmp_path, 101).unlink()
    checkpoint_path(tmp_path, 105).unlink()
    checkpoint_path(tmp_path, 106).unlink()
    save_checkpoint(model, optimizer, 0, 1.0, checkpoint_path(tmp_path, 10), step=10)
    checkpoint_path(tmp_path, 100).write_bytes(b"damaged, somehow")
    assert proven_checkpoint(tmp_path, 200, 6) == checkpoint_path(tmp_path, 10)
    said = io.StringIO()
    assert newest_checkpoint(tmp_path, said.write).state["step"] == 10
    assert "step_100.safetensors" in said.getvalue()
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_a_checkpoint_changed_in_place_is_none_of_those_that_stay(tmp_path):
    """Name, inode and size stay those of the file that this process wrote whole."""
    model, optimizer = made()
    paths = [checkpoint_path(tmp_path, number) for number in (1, 2, 3)]
    for number, path in enumerate(paths, 1):
        save_checkpoint(model, optimizer, 0, 1.0, path, step=number)
    stat = paths[1].stat()
    with open(paths[1], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    os.utime(paths[1], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    prune_checkpoints(tmp_path, 3)
    assert list_checkpoints(tmp_path) == paths[::-1]


def test_model_with_a_replaced_part_is_refused_when_saved(tmp_path):
    """Loading would refuse it; needle.save keeps it for a module that is given."""

    def other_mlp(model):
        model.layers[1].mlp = nn.Sequential(nn.Linear(16, 16))

    def other_width(model):
        model.embed_in = nn.Embedding(53, 8)

    def other_dtype(model):
        model.final_layer_norm = nn.LayerNorm1d(16, dtype="bfloat16")

    def one_layer_more(model):
        model.layers.append(Pythia(CONFIG).layers[0])

    def a_part_without_parameters(model):
        model.layers[0].mlp.act = nn.ReLU()

    def an_own_parameter(model):
        model.scale = nn.Parameter([1.0])

    def no_bias(model):
        model.layers[0].mlp.dense_h_to_4h.bias = None

    def other_eps(model):
        model.layers[1].input_layernorm.eps = 0.5

    def other_heads(model):
        model.layers[0].attention.heads = 4

    def other_residual(model):
        model.layers[0].parallel = not model.layers[0].parallel

    def a_subclass_of_the_same_name(model):
        mlp = model.layers[0].mlp
        mlp.__class__ = type("MLP", (type(mlp),), {"__module__": __name__})

    changes = (other_mlp, other_width, other_dtype, one_layer_more, a_part_without_parameters)
    changes += (an_own_parameter, no_bias, other_eps, other_heads, other_residual)
    for change in (*changes, a_subclass_of_the_same_name):
        np.random.seed(1)
        model = Pythia(CONFIG)
        change(model)
        path = tmp_path / f"{change.__name__}.safetensors"
        with pytest.raises(ValueError, match="not what its configuration makes"):
            save_checkpoint(model, None, 0, 0.0, path)
        with pytest.raises(ValueError, match="not what its configuration makes"):
            model.save_pretrained(tmp_path / "hf")
        assert not path.exists() and not (tmp_path / "hf").exists()
        ndl.save(model, None, path)
        with pytest.raises(CheckpointError, match="make one, and ndl.load"):
            ndl.load(path)
        np.random.seed(2)
        again = Pythia(CONFIG)
        change(again)
        ndl.load(path, again)
        assert_same_arrays(weights(model), weights(again))


def test_an_optimizer_that_cannot_come_back_is_refused_when_saved(tmp_path):
    class Own(optim.SGD):
        pass

    model, _ = made()
    path = tmp_path / "own.safetensors"
    with pytest.raises(TypeError, match="Own is not of needle.optim"):
        save_checkpoint(model, Own(model.parameters()), 0, 0.0, path)
    stranger = optim.SGD([("embed_in.weight", nn.Parameter(np.ones((53, 16))))])
    with pytest.raises(ValueError, match="'embed_in.weight' is not the model's"):
        save_checkpoint(model, stranger, 0, 0.0, path)
    assert not path.exists()


def test_a_registered_module_needs_no_device_of_its_own(tmp_path, monkeypatch):
    """A plain Module with a configuration, as models/registry.py asks for it."""
    families = dict(models.registry._families)
    monkeypatch.setattr(models.registry, "_families", families)

    @dataclasses.dataclass(frozen=True)
    class PlainConfig(models.Config):
        width: int = 3

    @models.register("plain")
    class Plain(nn.Module):
        config_class = PlainConfig

        def __init__(self, config, device=None) -> None:
            super().__init__()
            self.config, self.layer = config, nn.Linear(config.width, 2, device=device)

    model = Plain(PlainConfig(5))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    path = save_checkpoint(model, optimizer, 2, 0.5, tmp_path / "a.safetensors")
    again, _, epoch, _ = load_checkpoint(path)
    assert epoch == 2 and again.config == PlainConfig(5)
    for ours, theirs in zip(model.parameters(), again.parameters()):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
