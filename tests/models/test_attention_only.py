"""Models without MLPs."""

import numpy as np
import pytest

import needle as ndl


def test_attention_only_is_decomposed_saved_and_generates(tmp_path):
    """Its activations: tests/interp/test_hooks.py."""
    shape = {"vocab_size": 50, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
    bare = ndl.Pythia(ndl.PythiaConfig(**shape, attention_only=True))
    ids = np.random.RandomState(0).randint(0, 50, (2, 11))
    every = bare.run_with_cache(ids)[1]
    labels = every.decompose_resid(return_labels=True)[1]
    assert labels == ["embed", "0_attn_out", "1_attn_out", "2_attn_out"]
    total = every.decompose_resid().numpy().sum(0)
    np.testing.assert_allclose(total, every["resid_post", 2].numpy(), atol=2e-5)

    path = ndl.save_checkpoint(bare, None, 0, 1.0, tmp_path / "a.safetensors")
    again = ndl.load_checkpoint(path)[0]
    assert (again(ids)[0].numpy() == bare(ids)[0].numpy()).all() and again.config.attention_only
    prompt = ids[0, :4]
    tokens = bare.generate(prompt, 6, temperature=0.0)
    for length in range(4, 10):  # with the cache, as without it
        assert tokens[length] == bare(tokens[None, :length])[0].numpy()[0, -1].argmax()
    with pytest.raises(ValueError, match="no MLPs .attention_only."):
        bare.save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
