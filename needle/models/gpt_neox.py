"""GPT-NeoX as Hugging Face's `transformers` spells it: config.json and the names of tensors. It is
the weight mapping (needle/hf) of Pythia.

Our names of tensors are theirs without `gpt_neox.`; their head is `embed_out` or `lm_head`.
"""

from __future__ import annotations

import re
from typing import Any

MODEL_TYPE = "gpt_neox"
# A tied model's file may hold the head as well; it must then be the embedding.
TIED_HEAD = "embed_out.weight"

# Hugging Face's hidden_act to ours. Those of one form differ in the order of roundings alone.
READ_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast",
    "gelu_accurate": "gelu_new",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}
WRITE_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}  # the one name that they do not know

# Their names of sizes, which a configuration must have, to ours; those that have a default.
SIZES = {name: name for name in ("vocab_size", "hidden_size", "intermediate_size")}
SIZES |= {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
DEFAULTS = {
    "max_position_embeddings": ("max_seq_len", 2048),
    "layer_norm_eps": ("layer_norm_eps", 1e-5),
    "use_parallel_residual": ("use_parallel_residual", True),
    "tie_word_embeddings": ("tie_word_embeddings", False),
}
ROTARY = (
    ("partial_rotary_factor", "rotary_pct", "rotary_pct", 0.25),
    ("rope_theta", "rotary_emb_base", "rotary_base", 10000.0),
)

# Older versions saved these beside the parameters; they follow from the configuration.
BUFFERS = re.compile(
    r"(layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.\w+)"
    r"|rotary_emb\.\w+)"
)


def config_from_hf(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a PythiaConfig that the dictionary of a GPTNeoXConfig describes, in any
    version's names. ValueError lists all that is missing or that needle cannot do."""
    problems = [f"{name} is missing" for name in SIZES if fields.get(name) is None]
    act = fields.get("hidden_act", "gelu")
    if act not in READ_ACTIVATIONS:
        problems.append(f"hidden_act is {act!r}, but must be one of {', '.join(READ_ACTIVATIONS)}")
    if fields.get("attention_bias", True) is not True:
        problems.append("attention_bias is false; needle's attention has biases")
    rotary: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):  # in the order in which transformers reads
        given = fields.get(name) or {}
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            problems.append(f"{name} asks for {kind!r} positions; needle knows 'default' only")
        rotary = rotary or given
    if problems:
        raise ValueError("; ".join(problems))
    read = {name: fields[theirs] for theirs, name in SIZES.items()}
    read |= {name: fields.get(theirs, value) for theirs, (name, value) in DEFAULTS.items()}
    for nested, theirs, name, value in ROTARY:
        found = rotary.get(nested, fields.get(theirs, value))
        read[name] = float(found) if isinstance(found, int) else found
    return read | {"hidden_act": READ_ACTIVATIONS[act]}


def config_to_hf(config: Any) -> dict[str, Any]:
    """config.json of a model, without special tokens. Rotary is written as transformers 4 and as 5
    reads it. ValueError for a model that transformers would compute otherwise.

    >>> fields = ndl.models.gpt_neox.config_to_hf(ndl.PythiaConfig.preset("70m"))
    >>> fields["hidden_act"], fields["rotary_pct"], fields["num_hidden_layers"]
    ('gelu_new', 0.25, 6)
    """
    if config.use_sparse_attention:
        raise ValueError(
            "save_pretrained: this model's attention is block-sparse, which GPT-NeoX "
            "in transformers is not: it would compute something else. Save it with "
            "save_checkpoint"
        )
    if config.attention_only:
        raise ValueError(
            "save_pretrained: this model has no MLPs (attention_only), and each layer of GPT-NeoX "
            "in transformers has one. Save it with save_checkpoint"
        )
    fields = {theirs: getattr(config, name) for theirs, name in SIZES.items()}
    fields |= {theirs: getattr(config, name) for theirs, (name, _) in DEFAULTS.items()}
    fields |= {theirs: getattr(config, name) for _, theirs, name, _ in ROTARY}
    rotary = {nested: getattr(config, name) for nested, _, name, _ in ROTARY}
    return fields | {
        "architectures": ["GPTNeoXForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.1,
        "dtype": config.dtype,
        "hidden_act": WRITE_ACTIVATIONS.get(config.hidden_act, config.hidden_act),
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "model_type": MODEL_TYPE,
        "rope_parameters": {**rotary, "rope_type": "default"},
        "torch_dtype": config.dtype,
        "use_cache": True,
    }


def hf_name(name: str) -> str:
    """Their name of our parameter."""
    return name if name.startswith("embed_out.") else f"gpt_neox.{name}"


def our_name(name: str) -> str:
    """Our name of their tensor; of one that we do not have, whatever it is."""
    name = name.removeprefix("gpt_neox.")
    return "embed_out." + name.removeprefix("lm_head.") if name.startswith("lm_head.") else name


def is_buffer(name: str) -> bool:
    """True if a tensor is no parameter: older versions saved values derived from config.json."""
    return BUFFERS.fullmatch(name) is not None
