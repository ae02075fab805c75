"""Checkpoints: what goes in comes out, bit for bit; whatever is not whole is refused, by name."""

import dataclasses
import io
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
    last_good_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from needle.data.__main__ import main as data_main
from needle.models import checkpoint_file
from needle.models.pythia import Pythia, PythiaConfig
from needle.safetensors import pack, unpack
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
    yield "list over a flat part", lambda: nn.flatten_parameters(part) and model.parameters()


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


def test_tokenizer_is_in_the_checkpoint_of_its_model(tmp_path):
    """Before one that lies in the folder of its run, which comes before one beside the file."""
    path, (model, _) = checkpoint_path(tmp_path / "checkpoints", 1), made()
    save_checkpoint(model, None, 0, 1.0, path)
    with pytest.raises(ValueError, match="step_1.*: holds no tokenizer: give a tokenizer.json"):
        ndl.data.load_tokenizer(path)
    for words, place in ("one two", path.parent), ("a dog", tmp_path), ("the cat sat", None):
        tokenizer = ndl.data.train_tokenizer(iter([words] * 9), 280)
        if place is None:
            model.tokenizer = tokenizer
            save_checkpoint(model, None, 0, 1.0, path)
        else:
            tokenizer.save(str(place / "tokenizer.json"))
        found = [
            load(path).tokenizer
            for load in (
                lambda path: load_checkpoint(path)[0],
                lambda path: ndl.load(path)[0],
                Pythia.from_pretrained,
            )
        ]
        for read in found:
            assert type(read) is ndl.data.Tokenizer and read.to_str() == tokenizer.to_str()
    assert ndl.data.load_tokenizer(path).encode("the cat").ids == tokenizer.encode("the cat").ids


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
    np.random.seed(5)
    np.random.standard_normal(3)  # an odd number: half of a pair is kept
    extra = {"step": 9, "data": {"epoch": 1, "batch": 4}, "schedule": {"lr": 0.1}}
    path = save_checkpoint(Pythia(CONFIG), None, 1, float("nan"), tmp_path / "a", **extra)
    expected = np.random.standard_normal(5)
    state = Checkpoint(path).state
    assert {key: state[key] for key in extra} == extra and np.isnan(state["loss"])
    assert state["versions"]["numpy"] == np.__version__
    Checkpoint(path).restore_random_state()
    np.testing.assert_array_equal(np.random.standard_normal(5), expected)


def test_missing_file_is_named_and_devices_have_names(saved, tmp_path):
    for read in load_checkpoint, ndl.load, Checkpoint, lambda path: ndl.load(path, made()[0]):
        with pytest.raises(FileNotFoundError, match="none.safetensors: cannot be read: No such"):
            read(tmp_path / "none.safetensors")
        with pytest.raises(CheckpointError):
            read(tmp_path / "none.safetensors")
    folder = tmp_path / "hf"
    Pythia(CONFIG).save_pretrained(folder)
    for make in (  # every way to a model, and one of each kind of constructor
        lambda device: load_checkpoint(saved, device)[0],
        lambda device: ndl.load(saved, device=device),
        lambda device: Checkpoint(saved).restore_model(device),
        lambda device: Pythia.from_pretrained(folder, device=device),
        lambda device: evaluate.load_model(folder, device=device)[0],
        lambda device: evaluate.load_model(saved, device=device)[0],
        lambda device: Pythia(CONFIG, device=device),
        lambda device: ndl.backend_ndarray.empty((2,), device=device),
        lambda device: ndl.ones(2, device=device),
        lambda device: ndl.Tensor([1], device=device),
        lambda device: nn.Linear(2, 2, device=device),
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
        lambda: ndl.data.open_data(""),
        lambda: ndl.data.open_data(".", ""),
        lambda: model.save_pretrained(""),
    ]:
        with pytest.raises(CheckpointError, match=message):
            use()
    for main, words in (
        (shell.main, ["export", "", "new", "--overwrite"]),
        (shell.main, ["export", "m.safetensors", "", "--overwrite"]),
        (shell.main, ["import", "", "new", "--overwrite"]),
        (shell.main, ["import", "theirs", "", "--overwrite"]),
        (data_main, ["inspect", ""]),
        (data_main, ["view", "", "--step", "1"]),
        (evaluate.main, ["theirs", "--data", ""]),
    ):
        assert main(words) == 1
        assert ": an empty name ('')" in capsys.readouterr().err, words
    assert sorted(tmp_path.rglob("*")) == before


# ---- damage -----------------------------------------------------------------------------------


def refused(path):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_bytes_of_arrays_of_any_strides():
    values = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    for array in (values, values.T, values[::-1], values[:, ::2], np.asfortranarray(values)):
        nothing = np.zeros((0, 3), "f4")
        content = pack({"before": np.ones(3, "f4"), "array": array, "none": nothing})
        found = unpack(content, "the bytes")
        np.testing.assert_array_equal(found["array"], array)
        np.testing.assert_array_equal(found["before"], [1, 1, 1])
        assert found["none"].shape == (0, 3)
    with pytest.raises(TypeError, match="swapped: safetensors has no dtype >f4"):
        pack({"swapped": np.ones(3, ">f4")})


def test_file_that_is_cut_or_has_a_flipped_bit_is_refused(saved, monkeypatch):
    """Anywhere, also where a file is read in several blocks."""
    whole = saved.read_bytes()
    header, random = 8 + int.from_bytes(whole[:8], "little"), np.random.RandomState(0)
    lengths = [*range(20), *range(header - 10, header + 10), *range(0, len(whole), 997)]
    contents = [whole[:length] for length in (*lengths, len(whole) - 4, len(whole) - 1)]
    places = [*range(0, 120 * 8, 3), *random.randint(0, header * 8, 150), len(whole) * 8 - 1]
    for place in [*places, *random.randint(header * 8, len(whole) * 8, 150)]:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << (place % 8)
        contents.append(bytes(flipped))
    for block in 1 << 24, header + 1000:
        monkeypatch.setattr(checkpoint_file, "CHUNK", block)
        for content in contents:
            saved.write_bytes(content)
            refused(saved)
        saved.write_bytes(whole + b"\0")
        assert "truncated or altered" in refused(saved)
        saved.write_bytes(whole)
        load_checkpoint(saved)


def test_foreign_files(tmp_path):
    from safetensors.numpy import save_file

    path, texts = tmp_path / "foreign", (b"{}", b"[]", b"null", b'{"a":"b"}')
    headers = [len(text).to_bytes(8, "little") + text for text in texts]
    for content in b"", b"hello", b"more than eight bytes of text\n", b"\xff" * 64, *headers:
        path.write_bytes(content)
        refused(path)
    for metadata in None, {"format": "pt", "checksum": "0"}:
        save_file({"a": np.zeros(3, np.float32)}, path, metadata=metadata)
        assert "not one of needle's checkpoints" in refused(path)
    assert "no good checkpoint" in refused(tmp_path)


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


def test_all_misfits_are_listed_in_one_error(tmp_path, monkeypatch):
    model, _ = made()
    model.config = dataclasses.replace(CONFIG, vocab_size=54, num_layers=3)
    monkeypatch.setattr(PythiaConfig, "misfits", lambda config, module: [])
    message = refused(save_checkpoint(model, None, 0, 1.0, tmp_path / "a"))
    assert "embed_in.weight has shape [53, 16], not [54, 16]" in message
    assert "layers.2.mlp.dense_h_to_4h.weight is missing" in message


# ---- writing ----------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file(saved):
    before, (model, optimizer) = saved.read_bytes(), made()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"{saved}: cannot be written: File too large"):
            save_checkpoint(model, optimizer, 0, 1.0, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]


def test_model_with_a_replaced_part_is_refused_when_saved(tmp_path):
    """Loading would refuse it; needle.save keeps it for a module that is given."""
    for number, change in enumerate(
        (
            lambda model: setattr(model.layers[1], "mlp", nn.Sequential(nn.Linear(16, 16))),
            lambda model: setattr(model, "embed_in", nn.Embedding(53, 8)),
            lambda model: setattr(model, "final_layer_norm", nn.LayerNorm1d(16, dtype="bfloat16")),
            lambda model: model.layers.append(Pythia(CONFIG).layers[0]),
            lambda model: setattr(model.layers[0].mlp, "act", nn.ReLU()),
            lambda model: setattr(model, "scale", nn.Parameter([1.0])),
            lambda model: setattr(model.layers[0].mlp.dense_h_to_4h, "bias", None),
            lambda model: setattr(model.layers[1].input_layernorm, "eps", 0.5),
            lambda model: setattr(model.layers[0].attention, "heads", 4),
        )
    ):
        model, again = Pythia(CONFIG), Pythia(CONFIG)
        change(model), change(again)
        path, folder = tmp_path / f"{number}.safetensors", tmp_path / "hf"
        with naming(number):
            with pytest.raises(ValueError, match="not what its configuration makes"):
                save_checkpoint(model, None, 0, 0.0, path)
            with pytest.raises(ValueError, match="not what its configuration makes"):
                model.save_pretrained(folder)
        assert not path.exists() and not folder.exists()
        ndl.save(model, None, path)
        with pytest.raises(CheckpointError, match="make one, and ndl.load"):
            ndl.load(path)
        ndl.load(path, again)
        assert_same_arrays(weights(model), weights(again))


def test_what_could_not_be_made_again_is_refused_when_saved(tmp_path):
    class Own(optim.SGD):
        pass

    model, _ = made()
    stranger = optim.SGD([("embed_in.weight", nn.Parameter(np.ones((53, 16))))])
    for one, optimizer, error, said in (
        (model, Own(model.parameters()), TypeError, "Own is not of needle.optim"),
        (model, stranger, ValueError, "'embed_in.weight' is not the model's"),
        (nn.Linear(2, 2), None, TypeError, "models.register knows, as Pythia is, not Linear"),
    ):
        with pytest.raises(error, match=said):
            save_checkpoint(one, optimizer, 0, 0.0, tmp_path / "a.safetensors")
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
    for number in (10, 106):  # a training that went back to 10 keeps later steps
        prune_checkpoints(tmp_path, number, following=6)
        assert checkpoint_path(tmp_path, 101).exists() and len(list_checkpoints(tmp_path)) >= 4
    left = [106, 105, 101, 100]  # 100 is proven, 101 next; 10 was when 100 was not
    assert list_checkpoints(tmp_path) == [checkpoint_path(tmp_path, n) for n in left]
    assert last_good_checkpoint(tmp_path, 106, 6) == checkpoint_path(tmp_path, 100)
    assert last_good_checkpoint(tmp_path, 107, 6) == checkpoint_path(tmp_path, 101)
    assert last_good_checkpoint(tmp_path, 105, 6) is None
    checkpoint_path(tmp_path, 101).unlink()
    checkpoint_path(tmp_path, 105).unlink()
    checkpoint_path(tmp_path, 106).unlink()
    save_checkpoint(model, optimizer, 0, 1.0, checkpoint_path(tmp_path, 10), step=10)
    damaged = bytearray(checkpoint_path(tmp_path, 100).read_bytes())
    damaged[-1] ^= 1
    checkpoint_path(tmp_path, 100).write_bytes(damaged)  # the name, inode and size of a whole one
    assert last_good_checkpoint(tmp_path, 200, 6) == checkpoint_path(tmp_path, 10)
    said = io.StringIO()
    assert newest_checkpoint(tmp_path, said.write).state["step"] == 10
    assert "step_100.safetensors" in said.getvalue()
    assert newest_checkpoint(tmp_path / "nowhere") is None
