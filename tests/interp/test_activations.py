"""The activation cache, weights by head, text, and patching: by identities that hold for any model
(sums of components, one patch after another), and beside TransformerLens."""

import re
from functools import partial

import numpy as np
import pytest
from harness import naming
from test_hooks import IDS, small
from test_hooks import near as close

import needle as ndl
from needle import Tensor, nn, patching
from needle.interp.activations import get_act_name
from needle.models.pythia import Pythia

CLEAN = np.random.default_rng(8).integers(0, 29, IDS.shape)
NAMES = sorted(name for name in dir(patching) if name.startswith("get_act_patch"))
PATCHES = [name for name in NAMES if not name.endswith("every")]


def metric(logits):
    return logits[0, -1, 5] - logits[0, -1, 6] + logits[1, 3, 2]


# ---- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
def test_components_add_up_to_the_stream_and_the_logits(device, parallel):
    model = small(device, use_parallel_residual=parallel)
    logits, cache = model.run_with_cache(IDS)
    stream = cache["resid_post", -1]
    parts = cache.decompose_resid()
    close(cache.decompose_resid(1).sum(0), cache["resid_pre", 1])
    of_mlps = cache.decompose_resid(1, mlp_input=True, mode="mlp", return_labels=True)[1]
    assert of_mlps == ["embed", "0_mlp_out"]
    heads, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
    assert labels[:4] == ["L0H0", "L0H1", "L0H2", "L1H0"] and labels[-1] == "remainder"
    close(heads.sum(0), stream)
    if not parallel:
        before_mlp = cache.decompose_resid(1, mlp_input=True)
        close(before_mlp.sum(0), cache["resid_mid", 1])
        stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
        assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"]
        close(stack[3], cache["resid_mid", 1])
        for at in (0, 1):  # as the MLP of the layer sees them: by the scale of its own norm
            read, options = cache["normalized", at, "ln2"], {"mlp_input": True, "apply_ln": True}
            close(cache.decompose_resid(at, **options).sum(0), read)
            close(cache.accumulated_resid(at, **options)[-1], read)
            close(cache.accumulated_resid(at, pos_slice=[2, 4], **options)[-1], read[:, [2, 4]])
    lens = model.embed_out(cache.accumulated_resid(apply_ln=True))
    close(lens[-1], logits)
    seen = cache.apply_ln_to_stack(parts[:3], 1)
    close(seen.sum(0), cache["normalized", 1, "ln1"])
    bias = model.final_layer_norm.bias.numpy() @ model.W_U.numpy()
    wanted = logits.numpy() - bias
    close(cache.logit_attrs(heads, 7).sum(0), wanted[..., 7])
    close(cache.logit_attrs(heads, 7, 0).sum(0), wanted[..., 7] - wanted[..., 0])
    each = cache.logit_attrs(parts, np.array([4, 9])).sum(0)  # a token of each text
    close(each, np.stack([wanted[0, :, 4], wanted[1, :, 9]]))
    everywhere = cache.logit_attrs(parts, CLEAN).sum(0)
    close(everywhere, np.take_along_axis(wanted, CLEAN[..., None], -1)[..., 0])
    last = cache.decompose_resid(pos_slice=-1)
    close(cache.logit_attrs(last, 7, pos_slice=-1).sum(0), wanted[:, -1, 7])
    for at in 0, [2, 4]:
        options, read = {"pos_slice": at, "apply_ln": True}, cache["normalized"][:, at]
        close(cache.decompose_resid(**options).sum(0), read)
        close(cache.stack_head_results(incl_remainder=True, **options).sum(0), read)
    close(cache.stack_activation("scale", part="ln2")[1], cache["scale", 1, "ln2"])
    with pytest.raises(ValueError, match="must have one shape"):
        cache.logit_attrs(parts, 7, [1, 2])
    with pytest.raises(ValueError, match="layer must be from -1 to 2, not 3"):
        cache.accumulated_resid(3)


def test_weights_by_head_are_those_of_the_forward(device):
    model = small(device)
    _, cache = model.run_with_cache(IDS)
    x, z = cache["normalized", 1, "ln1"].numpy(), cache["z", 1].numpy()
    norm = model.layers[1].input_layernorm
    x = x * norm.weight.numpy() + norm.bias.numpy()
    for name in "QKV":
        weight, bias = (getattr(model, f"{kind}_{name}").numpy()[1] for kind in "Wb")
        close(np.einsum("btc,hcd->bthd", x, weight) + bias, cache[name.lower(), 1])
    close(np.einsum("bthd,hdc->bthc", z, model.W_O.numpy()[1]), cache["result", 1])
    close(cache["result", 1].numpy().sum(2) + model.b_O.numpy()[1], cache["attn_out", 1])
    post = cache["post", 0].numpy()
    close(post @ model.W_out.numpy()[0] + model.b_out.numpy()[0], cache["mlp_out", 0])
    close(model.W_E.numpy()[IDS], cache["embed"])
    assert model.W_in.shape == (2, 24, 96) and model.b_in.shape == (2, 96)
    attention = model.layers[0].attention
    attention.W_K.cached_data[1, 2:3, 3:4] = 7.0  # a view of the parameter
    assert (model.W_K.numpy()[0] == 7).sum() == 1
    model.W_Q.sum().backward()
    grad = attention.query_key_value.weight.grad.numpy().reshape(24, 3, 3, 8)
    assert (grad[:, :, 0] == 1).all() and (grad[:, :, 1:] == 0).all()
    tied = small(tie_word_embeddings=True)
    close(tied.W_U, tied.W_E.numpy().T)


def test_hooks_that_take_their_point():
    model, seen = small(), []

    def scale(x, hook):
        seen.append((hook.name, hook.layer()))
        return x * 0.5

    def is_z(name):
        return name.endswith("hook_z")

    got = model.run_with_hooks(IDS, [(is_z, scale), ("hook_embed", partial(by_factor, factor=2.0))])
    names = ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]
    assert seen == [(names[0], 0), (names[1], 1)] and not model.is_hooked
    same = {"hook_embed": lambda x: x * 2} | dict.fromkeys(names, lambda x: x * 0.5)
    for hooks in same, list(same.items()):
        np.testing.assert_array_equal(model.run_with_hooks(IDS, hooks).numpy(), got.numpy())
    assert list(model.run_with_cache(IDS, is_z)[1]) == names
    with pytest.raises(ValueError, match="true for no name of this model"):
        model.run_with_hooks(IDS, [(lambda name: False, scale)])


def test_names_of_transformer_lens_mean_the_same():
    model = small()
    plain = model(IDS[:1])[0].numpy()
    _, cache = model.run_with_cache(IDS[:1])
    whole = {name: x.numpy() for name, x in cache.items()}
    for name, same in (("blocks.0.hook_out", "resid_post0"), ("ln_final.hook_in", "resid_post1")):
        assert cache[name] is cache[same]
    with pytest.raises(KeyError, match="blocks.9.hook_resid_post is not in this cache"):
        cache["blocks.9.hook_out"]
    for _ in range(2):
        assert cache.remove_batch_dim() is cache
        assert all((x.numpy() == whole[name][0]).all() for name, x in cache.items())
    close(cache.decompose_resid().sum(0), whole["blocks.1.hook_resid_post"][0])
    with pytest.raises(ValueError, match="hook_embed is of 2 texts, not of one"):
        model.run_with_cache(IDS)[1].remove_batch_dim()
    targets = np.full(IDS.shape, -1)
    targets[:, :-1] = IDS[:, 1:]
    wanted = model(IDS, targets)[1].item()
    assert model(IDS, return_type="loss").item() == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ValueError, match="return_type must be .* not 'logit'"):
        model(IDS, return_type="logit")
    model.add_hook(lambda name: name.endswith("hook_z"), lambda z: z * 0.0)
    hooked = model(IDS[:1])[0].numpy()
    assert model.run_with_hooks(IDS, {}, return_type="loss").item() != pytest.approx(wanted)
    model.reset_hooks()
    assert np.abs(hooked - plain).max() > 0.1 and not model.is_hooked
    np.testing.assert_array_equal(model(IDS[:1])[0].numpy(), plain)


def by_factor(x, hook, factor):
    assert hook.name == "hook_embed"
    return x * factor


# ---- text ----------------------------------------------------------------------------------------


def test_text_in_the_place_of_ids(tmp_path):
    model = small(vocab_size=300)
    with pytest.raises(ValueError, match="Pythia has no tokenizer, so it takes ids"):
        model("the cat")
    tokenizer = ndl.data.train_tokenizer(iter(["the cat sat on the mat \u00e9"] * 9), 300)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    end = tokenizer.token_to_id(ndl.data.END_OF_TEXT)
    texts = ["the cat sat on", "mat \u00e9"]
    for given in (tokenizer, path, str(path)):
        model.tokenizer = given
        assert isinstance(model.tokenizer, ndl.data.Tokenizer)
        ids = model.to_tokens(texts)
        short = len(tokenizer.encode(texts[1]).ids)
        assert ids.dtype == np.int32 and (ids[1, short:] == end).all() and short < ids.shape[1]
        assert model.to_string(ids[0]) == texts[0] and model.to_string(ids)[0] == texts[0]
        pieces = model.to_str_tokens(texts[0])
        assert "".join(pieces) == texts[0]
        assert model.to_str_tokens(texts[0], prepend_bos=True) == [ndl.data.END_OF_TEXT, *pieces]
        assert model.to_tokens("the", prepend_bos=True)[0, 0] == end
        np.testing.assert_array_equal(model(texts)[0].numpy(), model(ids)[0].numpy())
        np.testing.assert_array_equal(model(texts[0])[0].numpy(), model(ids[:1])[0].numpy())
        close(model(texts)[0][1, :short], model(texts[1])[0][0])
    lengths = [model.to_tokens(text).size - 1 for text in texts]  # the targets of each
    losses = [model(text, return_type="loss").item() for text in texts]
    for several in texts, [*texts, ""]:  # of no tokens: it has no target
        close(model(several, return_type="loss"), np.average(losses, weights=lengths))
    assert model.to_single_token(" cat") == tokenizer.encode(" cat").ids[0]
    column = model.W_U.numpy()[:, model.to_single_token(" mat")]
    close(model.token_directions([" cat", " mat"])[1], column)
    assert small(dtype="bfloat16").token_directions([3, 4]).dtype == "float32"
    _, cache = model.run_with_cache("the cat")
    assert cache.logit_attrs(cache.decompose_resid(), " mat", " cat").shape[1:] == (1, 2)
    for wrong, error, said in (
        (lambda: model.to_single_token(texts[0]), ValueError, "tokens, .*, not one"),
        (lambda: model(""), ValueError, "shape is"),
        (lambda: model.to_string([3, -1]), OverflowError, None),
        (lambda: model.to_string(1.5), TypeError, None),
        (lambda: model.to_tokens(["the", 5]), TypeError, None),
        (lambda: setattr(model, "tokenizer", 5), TypeError, "must be a tokenizers.Tokenizer, "),
    ):
        with pytest.raises(error, match=said):
            wrong()


def test_what_a_model_does_not_compute_says_why():
    only, parallel = small(attention_only=True), small()
    for model, name, why in (
        (only, "mlp_out", "the layers of this model have no MLPs"),
        (only, "post", "the layers of this model have no MLPs"),
        (only, "resid_mid", "the layers of this model have no MLPs"),
        (parallel, "resid_mid", "with a parallel residual nothing is between"),
    ):
        _, cache = model.run_with_cache(IDS)
        full = get_act_name(name, 0)
        patch = model, IDS, cache, metric, name, (1,)
        for use, arguments in (
            (cache.__getitem__, ((name, 0),)),
            (patching.generic_activation_patch, patch),
            (patching.generic_attribution_patch, patch),
            (model.run_with_hooks, (IDS, [(full, np.copy)])),
        ):
            with naming(full), pytest.raises((KeyError, ValueError), match=f"{full}.*: {why}"):
                use(*arguments)
        with pytest.raises(KeyError, match="run_with_cache captures all names"):
            cache["attn_out", 7]
    for name in "W_in", "b_out":
        with pytest.raises(AttributeError, match=f"{name}: the layers of this model have no MLPs"):
            getattr(only, name)
    only.layers[1].attention = nn.Attention(24, 3, bias=False)
    assert only.W_Q.shape == (2, 3, 24, 8)
    with pytest.raises(AttributeError, match="b_Q: not all layers have one"):
        _ = only.b_Q


# ---- patching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel, steered", [(True, False), (False, False), (True, True)])
def test_patches_equal_one_run_after_another(device, parallel, steered):
    """Compares each element of each function with a forward with a NumPy hook, also where hooks are
    in force."""
    model = small(device, use_parallel_residual=parallel)
    logits, clean = model.run_with_cache(CLEAN)
    # A metric subtracts logits: its error is that of the logits, however near 0 it is.
    tolerance = 2e-6 * np.abs(logits.numpy()).max()
    assert len(PATCHES) == 15
    points = [get_act_name(short, layer) for short in ("resid_pre", "z") for layer in (0, 1)]
    steer = dict.fromkeys(points if steered else [], lambda x: x * 1.5 - 0.25)
    for name in PATCHES:
        function = getattr(patching, name)
        short, axes = function.keywords["activation_name"], function.keywords["axes"]
        if short == "resid_mid" and parallel:
            continue
        with model.hooks(steer):
            got = function(model, IDS, clean, metric, batch=14).numpy()
        sizes = tuple(clean[short, 0].shape[axis] for axis in axes)
        assert got.shape == (2, *sizes), name
        random = np.random.default_rng(1)
        for place in random.integers(0, got.shape, (4, got.ndim)):
            layer, *at = map(int, place)
            index = [slice(None)] * len(clean[short, 0].shape)
            for axis, one in zip(axes, at):
                index[axis] = one

            def patch(x, hook, index=tuple(index)):
                x = x.numpy().copy()
                x[index] = clean[hook.name].numpy()[index]
                return x

            with model.hooks(steer):
                wanted = metric(model.run_with_hooks(IDS, [(get_act_name(short, layer), patch)]))
            with naming(name, place):
                np.testing.assert_allclose(
                    got[tuple(place)], wanted.numpy(), rtol=0, atol=tolerance
                )
    assert not model.is_hooked
    last = lambda logits: logits[0, -1, 5]
    whole = patching.get_act_patch_resid_pre(model, IDS, clean, last)
    for at in [3, -1], -1:
        close(patching.get_act_patch_resid_pre(model, IDS, clean, last, logits_at=at), whole)
    of_first = lambda logits: logits[0, 0, 5]
    first = patching.get_act_patch_resid_pre(model, IDS, clean, of_first, batch=1)
    close(patching.get_act_patch_resid_pre(model, IDS, clean, last, logits_at=0), first)


@pytest.mark.parametrize("name, axes", [("z", (1, 2)), ("attn_scores", (1, 2)), ("pre", (2,))])
def test_attribution_is_the_first_order_of_a_patch(name, axes, device):
    """The clean run is the corrupted one with a small change. Scores of keys that are not seen are
    -inf in both."""
    model = small(device)
    model.layers[0].requires_grad_(False)
    trained = [p.requires_grad for p in model.parameters()]
    _, corrupted = model.run_with_cache(IDS)
    random = np.random.default_rng(3)
    near = type(corrupted)({}, model)
    for layer in 0, 1:
        x = corrupted[name, layer].numpy()
        moved = x + 1e-2 * random.standard_normal(x.shape).astype(np.float32)
        near[get_act_name(name, layer)] = Tensor(moved, device=model.device)
    given = model, IDS, near, metric, name, axes
    estimate = patching.generic_attribution_patch(*given).numpy()
    exact = patching.generic_activation_patch(*given).numpy()
    change = exact - metric(model(IDS)[0]).item()
    assert np.abs(change).max() > 1e-3
    close(estimate, change, 0.02)
    assert trained == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())


def test_wrong_patches_say_why():
    model, last = small(), lambda logits: logits[0, -1, 5]
    _, clean = model.run_with_cache(CLEAN)
    for patch in (patching.generic_attribution_patch, patching.generic_activation_patch):
        for texts, length in ((2, 5), (2, 1), (1, 3), (1, 1)):  # of as many heads as tokens, too
            _, other = model.run_with_cache(CLEAN[:texts, :length])
            with pytest.raises(ValueError, match="as many texts of as many tokens"):
                patch(model, IDS[:, :3], other, last, "pattern", (1,))
        for axes in ((1, 7), (1, -2), (2, 1), ()):
            with pytest.raises(ValueError, match="axes must be ascending axes of"):
                patch(model, IDS, clean, metric, "z", axes)
        for of in 5, lambda logits: logits[:, -1]:
            with pytest.raises(TypeError, match="the metric must return a Tensor of "):
                patch(model, IDS, clean, of, "z", (1,))
    assert not model.is_hooked and all(p.requires_grad for p in model.parameters())


def test_patches_of_a_hidden_of_ones_own_need_its_hidden_from():
    """That of Pythia would leave out what the subclass adds."""

    class Louder(Pythia):
        def hidden(self, ids, cache=None):
            return super().hidden(ids, cache) * 2.0

    class Whole(Louder):
        def hidden_from(self, x, layer):
            return super().hidden_from(x, layer) * 2.0

    plain = small()
    _, clean = plain.run_with_cache(CLEAN)
    for cls, factor in (Louder, None), (Whole, 2.0):
        model = cls(plain.config)
        model.load_state_dict(plain.state_dict())
        patch = partial(patching.get_act_patch_resid_pre, model, IDS, clean, metric)
        if factor is None:
            with pytest.raises(NotImplementedError, match="Louder: its hidden.. needs a hidden_fr"):
                patch()
        else:
            wanted = patching.get_act_patch_resid_pre(plain, IDS, clean, metric).numpy()
            close(patch(), wanted * factor)


def in_transformer_lens(model: Pythia, folder):
    """The model in TransformerLens, on the CPU."""
    import torch
    import transformers

    reason = "transformer_lens not installed (pip install .[parity])"
    lens = pytest.importorskip("transformer_lens.model_bridge", reason=reason)
    model.save_pretrained(folder)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    theirs = lens.TransformerBridge.boot_transformers(str(folder), hf_model=peer, device="cpu")
    theirs.cfg.use_attn_result = True
    theirs.enable_compatibility_mode(no_processing=True)  # masks with -inf, folds no weight
    return theirs


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("parallel", [True, False])
def test_analyses_are_those_of_transformer_lens(parallel, tmp_path):
    """Stacks, labels, attributions of token differences with the final norm folded, patching, and
    weights by head."""
    model = small(use_parallel_residual=parallel)
    theirs = in_transformer_lens(model, tmp_path)
    import torch
    from transformer_lens import patching as their_patching
    from transformer_lens.utilities import get_act_name as their_name

    for short in (("q", 3), ("scale", 1, "ln2"), ("scale",), ("k6",), ("resid_post", 2)):
        assert get_act_name(*short) == their_name(*short)
    with torch.no_grad():
        _, wanted = theirs.run_with_cache(torch.from_numpy(CLEAN))
        _, cache = model.run_with_cache(CLEAN)
        for name, options in (
            ("accumulated_resid", {}),
            ("accumulated_resid", {"apply_ln": True, "pos_slice": -1}),
            ("accumulated_resid", {"layer": 1, "apply_ln": True}),
            ("accumulated_resid", {"apply_ln": True, "pos_slice": (1, 4)}),
            ("decompose_resid", {"mode": "attn", "apply_ln": True}),
            ("decompose_resid", {"layer": 1, "incl_embeds": False}),
            ("stack_head_results", {"incl_remainder": True, "apply_ln": True, "pos_slice": 3}),
        ):
            with naming(name, options):
                ours, labels = getattr(cache, name)(return_labels=True, **options)
                stack, their_labels = getattr(wanted, name)(return_labels=True, **options)
                assert labels == their_labels and ours.shape == tuple(stack.shape)
                close(ours, stack.numpy(), 1e-4)
        lacking = "rotary|hook_(cos|sin|unembed|hidden)|^embed.hook_in|unembed.hook_out"
        for name in wanted:
            if not re.search(lacking, name):
                with naming(name):
                    close(cache[name], wanted[name].numpy(), 1e-4)
        for name in ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_E", "W_U", "b_Q", "b_O"):
            close(getattr(model, name), getattr(theirs, name).numpy())
        ids = torch.from_numpy(IDS)
        for kind in "logits", "loss", "both", None:
            ours, wanted_ones = (m(x, return_type=kind) for m, x in ((model, IDS), (theirs, ids)))
            if kind is None:
                assert ours is wanted_ones is None
                continue
            for one, other in zip(*((x if kind == "both" else [x]) for x in (ours, wanted_ones))):
                close(one, other.numpy(), 1e-4)
        for name in "n_layers", "n_heads", "d_model", "d_head", "d_mlp", "n_ctx", "d_vocab":
            assert getattr(model.cfg, name) == getattr(theirs.cfg, name), name

        every = "block_every", "attn_head_all_pos_every", "attn_head_by_pos_every"
        for name in ("attn_head_out_by_pos", "resid_pre", "attn_head_pattern_all_pos", *every):
            full = f"get_act_patch_{name}"
            stack = getattr(their_patching, full)(theirs, ids, wanted, metric)
            close(getattr(patching, full)(model, IDS, cache, metric), stack.numpy(), 1e-4)
