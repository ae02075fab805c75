"""Files that ask for more than they hold, or would wait for ever: one clear error, at once, and in
the memory that their tensors take."""

import copy
import dataclasses
import errno
import json
import os
import resource
import sys

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import checkpoint, nn, optim, safetensors
from needle.checkpoint import Checkpoint, CheckpointError, load, save_checkpoint
from needle.data import DataError, load_tokenizer, open_data
from needle.data.__main__ import main as view_data
from needle.data.runs import open_run_data
from needle.evaluate import load_model
from needle.files import Lock
from needle.hf.__main__ import import_folder
from needle.models.pythia import Pythia, PythiaConfig

pytestmark = pytest.mark.slow

CONFIG = PythiaConfig(vocab_size=16, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=32)
HUGE = [2**31, 2**62]


@pytest.fixture(autouse=True)
def little_memory():
    """Limit memory to 4 GiB beyond that of the process."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def folder(tmp_path):
    """A folder as transformers saves a model."""
    Pythia(CONFIG).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_sizes_in_config_json(folder):
    path = folder / "config.json"
    good = json.loads(path.read_text())
    for field, said in [
        ("num_hidden_layers", "far more tensors than there are"),
        ("max_position_embeddings", "far more than its weights"),
        ("vocab_size", "embed_in.weight has shape|passes 2|no memory"),
        ("intermediate_size", "dense_h_to_4h.weight has shape|passes 2|no memory"),
    ]:
        for value in HUGE:
            path.write_text(json.dumps(good | {field: value}))
            with naming(field, value), pytest.raises(CheckpointError, match=said) as caught:
                load_model(folder)
            assert str(folder) in str(caught.value)


def test_a_long_context_still_loads(tmp_path):
    """A million positions, as those who stretch rotary models give them."""
    config = PythiaConfig(**CONFIG.to_dict() | {"max_seq_len": 1 << 20})
    path = save_checkpoint(Pythia(config), None, 0, 1.0, tmp_path / "a.safetensors")
    model, *_ = Checkpoint(path).restore()
    assert model.config.max_seq_len == 1 << 20


WRONG_OPTIMIZERS = [
    ({"class": "Optimizer"}, "its class is 'Optimizer'; there are Adam, AdamW, SGD$"),
    ({"class": "_PerParameter"}, "its class is '_PerParameter'; there are"),
    ({"class": "Tensor"}, "its class is 'Tensor'; there are"),
    ({"class": ["AdamW"]}, "its class is .'AdamW'.; there are"),
    ({"lr": "x"}, "lr must be finite and not negative, but is 'x'"),
    ({"lr": float("nan")}, "lr must be finite and not negative, but is nan"),
    ({"lr": -0.1}, "lr must be finite and not negative, but is -0.1"),
    ({"lr": True}, "lr must be finite and not negative, but is True"),
    ({"beta1": 1.0, "eps": 10**400}, r"beta1 must be in \[0, 1\), but is 1.0; eps must be"),
    ({"step": 2**80}, "step must be a whole number of 0 to 2.53, but is 1208925"),
    ({"step": 2.5}, "step must be a whole number"),
    ({"step": -1}, "step must be a whole number"),
    ({"groups": "x"}, "groups must be a dict of dicts, but is 'x'"),
    ({"groups": {"embed_in.weight": {"lr": None}}}, "lr must be finite.*but is None"),
]


def test_an_optimizer_with_a_right_checksum(tmp_path, monkeypatch):
    """One error that names the file and the setting, from load and from load into; nothing
    changes."""
    model, write, wrong = Pythia(CONFIG), checkpoint._write, {}
    optimizer = optim.AdamW(model.parameters())
    before = optimizer.state_dict()
    monkeypatch.setattr(
        checkpoint,
        "_write",
        lambda f, tensors, old: write(f, tensors, old | {"optimizer": old["optimizer"] | wrong}),
    )
    for wrong, said in WRONG_OPTIMIZERS:
        path = save_checkpoint(model, optimizer, 0, 1.0, tmp_path / "a.safetensors")
        for into in ((), (model, optimizer)):
            message = "holds the state of" if into and "class" in wrong else said
            with naming(wrong, into), pytest.raises(CheckpointError, match=message) as caught:
                load(path, *into)
            assert str(caught.value).startswith(f"{path}: ")
    assert {**optimizer.state_dict(), "arrays": 0} == {**before, "arrays": 0}


HOSTILE = [None, True, -1, 0, 1e308, float("inf"), float("nan"), 10**8, 2**62, 2**63, 10**400]
HOSTILE += ["", "x", [], {}, [[]], {"x": {}}, "Optimizer.__init__", ["MT19937", [1], 0, 0, 0.0]]


def leaves(value, path=()):
    """The path of each dict, list and leaf in a JSON value; of a list, its first and last item."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and value:
        items = {0: value[0], len(value) - 1: value[-1]}.items()
    for key, item in items:
        yield from leaves(item, (*path, key))


def replaced(value, path, by):
    if not path:
        return by
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


def test_checkpoint_with_any_value_of_its_state_replaced_loads_or_is_named(tmp_path, monkeypatch):
    """Right checksums: CheckpointError at worst, without memory for sizes that the file claims."""
    np.random.seed(0)
    model = Pythia(dataclasses.replace(CONFIG, num_layers=1))
    optimizer = optim.AdamW(nn.flatten_parameters(model))
    states, write, path = [], checkpoint._write, tmp_path / "a.safetensors"
    monkeypatch.setattr(
        checkpoint, "_write", lambda f, tensors, old: states.append(old) or write(f, tensors, old)
    )
    save_checkpoint(model, optimizer, 0, 1.0, path)
    good, live = json.loads(json.dumps(states[0])), ndl.cpu().memory_stats()["live_bytes"]
    ndl.cpu().reset_peak()
    for place in leaves(good):
        for value in HOSTILE:
            state = replaced(good, place, value)
            monkeypatch.setattr(
                checkpoint, "_write", lambda f, tensors, _, state=state: write(f, tensors, state)
            )
            save_checkpoint(model, optimizer, 0, 1.0, path)
            try:
                found = Checkpoint(path)
                repr(found)
                found.restore()
                found.restore_random_state()
                found.restore_into(model, optimizer)
            except CheckpointError as error:
                assert str(error).startswith(f"{path}: "), (place, value)
            except Exception as error:
                raise AssertionError(f"{place} = {value!r:.40}") from error
    assert ndl.cpu().memory_stats()["peak_bytes"] < live + (1 << 24)


def test_config_of_transformers_with_any_value_replaced_loads_or_is_named(folder):
    path = folder / "config.json"
    good, live = json.loads(path.read_text()), ndl.cpu().memory_stats()["live_bytes"]
    ndl.cpu().reset_peak()
    for place in leaves(good):
        for value in HOSTILE:
            path.write_text(json.dumps(replaced(good, place, value)))
            try:
                load_model(folder)
            except CheckpointError as error:
                assert str(folder) in str(error), (place, value)
            except Exception as error:
                raise AssertionError(f"{place} = {value!r:.40}") from error
    assert ndl.cpu().memory_stats()["peak_bytes"] < live + (1 << 24)


def test_config_of_a_run_with_any_value_replaced_is_viewed_or_named(tmp_path, capsys):
    tokens, path = tmp_path / "t.npy", tmp_path / "config.json"
    np.save(tokens, np.arange(60, dtype=np.uint16))
    sizes = {"batch_size": 2, "micro_batches": 3, "seq_len": 4, "seed": 1, "samples": 12}
    described = {"path": str(tokens), "tokenizer": None, "vocab_size": 64, "id_limit": 64}
    described |= {"fingerprint": open_data(tokens).fingerprint}
    good = {"settings": {"steps": 2}, "data": described | sizes}
    for place in leaves(good):
        for value in HOSTILE:
            if place == ("data", "path") and value is None:
                continue  # Python's library
            path.write_text(json.dumps(replaced(good, place, value)))
            try:
                code = view_data(["view", str(tmp_path), "--step", "2"])
            except Exception as error:
                raise AssertionError(f"{place} = {value!r:.40}") from error
            said = capsys.readouterr().err
            assert code == 0 or said.startswith("needle data: ") and said.count("\n") == 1


def test_configuration_with_any_value_is_made_or_names_the_field():
    derived = {"hidden_size": "intermediate_size", "num_heads": "hidden_size"}
    for field in [field.name for field in dataclasses.fields(PythiaConfig)]:
        for value in HOSTILE:
            fields = dataclasses.asdict(CONFIG) | {"intermediate_size": 0} | {field: value}
            with naming(field, f"{value!r:.20}"):
                try:
                    made = PythiaConfig(**fields)
                except ValueError as error:
                    assert field in str(error) or derived.get(field, field) in str(error)
                else:
                    kind = type(getattr(CONFIG, field))
                    assert type(getattr(made, field)) in ((kind, int) if kind is float else (kind,))


def test_optimizer_state_of_any_kind_loads_or_is_named():
    for kind, flat in (
        (optim.SGD, False),
        (optim.Adam, False),
        (optim.AdamW, False),
        (optim.AdamW, True),
    ):
        model = nn.Linear(3, 4)
        optimizer = kind(nn.flatten_parameters(model) if flat else model.parameters())
        good = optimizer.state_dict()
        states = [*HOSTILE, {"arrays": {}}]
        states += [{key: good[key] for key in good if key != left_out} for left_out in good]
        states += [good | {key: value} for key in good for value in HOSTILE]
        states += [good | {"arrays": good["arrays"] | {n: 3}} for n in good["arrays"]]
        for state in states:
            try:
                optimizer.load_state_dict(state)
            except (TypeError, ValueError) as error:
                assert str(error).startswith(f"{kind.__name__}.load_state_dict: "), state
        with pytest.raises(ValueError, match="step is missing; lr is missing"):
            optimizer.load_state_dict({})


def test_module_state_of_any_kind_loads_or_is_named():
    """Buffers too, which a module within has."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    good = {name: array.numpy() for name, array in model.state_dict().items()}
    for state in [*HOSTILE, *({**good, name: value} for name in good for value in HOSTILE)]:
        with pytest.raises((TypeError, ValueError), match=r"^Sequential.load_state_dict: "):
            model.load_state_dict(state)
    with pytest.raises(ValueError, match="running_var must be an array, but is None"):
        model.load_state_dict({**good, "modules.1.running_var": None})


def test_offsets_that_contradict_the_shapes(tmp_path):
    path, shapes = tmp_path / "a.safetensors", {"a": [2], "b": [3]}
    for offsets, said in [
        ([(0, 8), (8, 20)], None),
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
            assert [(entry.name, entry.shape) for entry in entries] == [("a", (2,)), ("b", (3,))]


def test_header_of_more_axes_than_numpy_has_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    entry = {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with open(path, "rb") as file, pytest.raises(safetensors.FileError, match="100000 axes; 64"):
        safetensors.read_header(file)


def idx_of(path):
    path.with_suffix(".bin").write_bytes(b"")
    return open_data(path.with_suffix(".bin"))


def bin_of(path):
    path.with_suffix(".idx").write_bytes(b"")
    return open_data(path)


@pytest.mark.parametrize(
    "name, read",
    [
        ("a.safetensors", load_model),
        ("hf", load_model),
        ("config.json", lambda path: load_model(path.parent)),
        ("model.safetensors", lambda path: load_model(path.parent)),
        ("model.safetensors.index.json", lambda path: load_model(path.parent)),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer.json", lambda path: load_tokenizer(load_model(path.parent)[1])),
        ("tokenizer.json", lambda path: import_folder(path.parent, path.parent.parent / "a" / "b")),
        ("data", open_data),
        ("data.txt", open_data),
        ("data.npy", open_data),
        ("data.bin", open_data),
        ("data.bin", bin_of),
        ("data.idx", idx_of),
        ("config.json", lambda path: open_run_data(path.parent)),
        ("lock", lambda path: Lock(path.parent)),
    ],
)
def test_a_fifo_is_named_and_not_waited_for(folder, name, read):
    path = folder / name
    if "index" in name:
        (folder / "model.safetensors").unlink()
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="it is a FIFO, not a regular file") as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_tokenizer_with_huge_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    for largest, usable in [(70_000, True), (2**31, False), (2**32 - 1, False)]:
        path = tmp_path / "tokenizer.json"
        model = tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, "a")
        text = json.loads(tokenizers.Tokenizer(model).to_str())
        text["model"]["vocab"]["c"] = largest
        path.write_text(json.dumps(text))
        if usable:
            assert load_tokenizer(path).token_to_id("c") == largest
        else:
            with pytest.raises(DataError, match=f"3 tokens have ids up to {largest:,}"):
                load_tokenizer(path)


def test_no_more_files_may_be_open(tmp_path, monkeypatch):
    """The error of the system, and nothing that Python prints when what was half made goes."""
    path = tmp_path / "a.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}")

    def dup(file):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    monkeypatch.setattr(os, "dup", dup)
    with open(path, "rb") as file, pytest.raises(OSError, match="Too many open files"):
        safetensors.read_header(file)
    assert not ignored
