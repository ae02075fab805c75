"""ActivationCache: the activations of a forward, by name, with the analyses of TransformerLens.

    logits, cache = model.run_with_cache("The capital of France is")
    cache["pattern", 0]                                         # blocks.0.attn.hook_pattern
    stream, labels = cache.accumulated_resid(apply_ln=True, return_labels=True)
    model.embed_out(stream)                                     # logit lens (nostalgebraist 2020)
    cache.logit_attrs(cache.stack_head_results(), token, other) # direct logit attribution

Names, arguments, order, labels and values are those of TransformerLens (Nanda and Bloom 2022) for a
model whose weights are not processed. Stacks begin with an axis of components. Axis letters: B
batch, T time, C channels, H heads, V vocabulary, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from needle import ops
from needle.autograd import Tensor

IN_ATTENTION = ("q", "k", "v", "z", "rot_q", "rot_k", "result", "pattern", "attn_scores")
PART_OF = {**dict.fromkeys(IN_ATTENTION, "attn"), "pre": "mlp", "post": "mlp"}
OTHER_NAMES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_post": "post",
}
PARTS = {"a": "attn", "attention": "attn", "m": "mlp"}
# Inputs and outputs of modules, by which TransformerLens' bridge names the same values again.
OF_MODULES = {"embed.hook_out": "hook_embed", "unembed.hook_in": "ln_final.hook_out"}
OF_MODULES |= {"hook_in": "hook_resid_pre", "ln1.hook_in": "hook_resid_pre"}
OF_MODULES |= {f"attn.{x}hook_in": "ln1.hook_out" for x in ("", "q.", "k.", "v.")}
OF_MODULES |= {f"attn.{x}.hook_out": f"attn.hook_{x}" for x in "qkv"}
OF_MODULES |= {"attn.o.hook_in": "attn.hook_z", "attn.hook_out": "hook_attn_out"}
OF_MODULES |= {"mlp.hook_in": "ln2.hook_out", "mlp.in.hook_in": "ln2.hook_out"}
OF_MODULES |= {"mlp.in.hook_out": "mlp.hook_pre", "mlp.out.hook_in": "mlp.hook_post"}
OF_MODULES |= {"mlp.out.hook_out": "hook_mlp_out", "mlp.hook_out": "hook_mlp_out"}
OF_MODULES["hook_out"] = "hook_resid_post"

Positions = int | slice | Sequence[int] | None


def get_act_name(name: str, layer: int | None = None, part: str | None = None) -> str:
    """Return the full name of an activation. part: "attn", "mlp", "ln1" or "ln2", where the name
    alone does not tell.

    >>> from needle.interp.activations import get_act_name
    >>> get_act_name("pattern", 0), get_act_name("resid_post5"), get_act_name("scale", 2, "ln1")
    ('blocks.0.attn.hook_pattern', 'blocks.5.hook_resid_post', 'blocks.2.ln1.hook_scale')
    """
    if "." in name or name.startswith("hook_"):
        return name
    short = re.fullmatch(r"([a-z_]+)(\d+)([a-z]?.*)", name)
    if short is not None and layer is None:
        name, layer, part = short[1], int(short[2]), short[3] or part
    name = OTHER_NAMES.get(name, name)
    part = PART_OF.get(name) or PARTS.get(part or "", part)
    if name in ("scale", "normalized") and layer is None:
        return f"ln_final.hook_{name}"
    block = "" if layer is None else f"blocks.{layer}."
    return f"{block}{part + '.' if part else ''}hook_{name}"


def absence(model: Any, name: str) -> str:
    """Return why a model of this configuration has no activation or weight of this name, or ""."""
    config = getattr(model, "config", None)
    of_mlp = re.search(r"mlp|ln2|resid_mid|^[Wb]_(in|out)$", name)
    if getattr(config, "attention_only", False) and of_mlp:
        return "the layers of this model have no MLPs (attention_only)"
    if getattr(config, "use_parallel_residual", False) and name.endswith("resid_mid"):
        return "with a parallel residual nothing is between attention and MLP"
    return ""


class ActivationCache(dict[str, Tensor]):
    """{name: Tensor}; a key may be short: "embed", ("q", 3), ("resid_post", -1), "scale4ln1".
    KeyError for activations that were not captured.

    >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=2, num_heads=2)
    >>> model = ndl.Pythia(config)
    >>> logits, cache = model.run_with_cache([[1, 2, 3]])
    >>> cache["pattern", -1].shape
    (1, 2, 3, 3)
    >>> stack, labels = cache.decompose_resid(return_labels=True)
    >>> labels
    ['embed', '0_attn_out', '0_mlp_out', '1_attn_out', '1_mlp_out']
    >>> attributions = cache.logit_attrs(stack, tokens=7)
    >>> attributions.shape
    (5, 1, 3)
    """

    def __init__(self, activations: dict[str, Tensor], model: Any) -> None:
        super().__init__(activations)
        self.model, self.has_batch_dim = model, True

    def __repr__(self) -> str:
        return f"ActivationCache of {len(self)} activations: {', '.join(self)}"

    def remove_batch_dim(self) -> ActivationCache:
        """Take the one text of each activation, in place, and return the cache. ValueError for a
        batch of several."""
        if not self.has_batch_dim:
            return self
        for name, x in self.items():
            if x.shape[0] != 1:
                raise ValueError(f"remove_batch_dim: {name} is of {x.shape[0]} texts, not of one")
        self.update({name: x[0] for name, x in self.items()})
        self.has_batch_dim = False
        return self

    @property
    def layers(self) -> int:
        return self.model.config.num_layers

    def __missing__(self, key: Any) -> Tensor:
        """Look up a short key."""
        name, *rest = key if isinstance(key, tuple) else (key,)
        if rest and isinstance(rest[0], int) and rest[0] < 0:
            rest[0] += self.layers
        full = get_act_name(str(name), *rest)
        block, inner = re.fullmatch(r"(blocks\.\d+\.)?(.*)", full, re.S).groups("")
        if full == "ln_final.hook_in":
            full = f"blocks.{self.layers - 1}.hook_resid_post"
        elif inner == "ln2.hook_in":
            mid, pre = (f"{block}hook_resid_{at}" for at in ("mid", "pre"))
            full = mid if mid in self else pre
        else:
            full = block + OF_MODULES.get(inner, inner)
        if full != key and full in self:
            return self[full]
        why = absence(self.model, full) or (
            "run_with_cache captures all names, or those that it is given "
            "(needle.hooks.hook_names lists them)"
        )
        raise KeyError(f"{full} is not in this cache: {why}")

    def _up_to(self, layer: int | None) -> int:
        if layer is not None and not -1 <= layer <= self.layers:
            raise ValueError(f"layer must be from -1 to {self.layers}, not {layer}")
        return self.layers if layer in (None, -1) else layer

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Positions = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """Return the residual stream before each layer up to `layer` (None: all, and the last
        output), (components, B, T, C). incl_mid: between attention and MLP too, where that exists.
        mlp_input: also what the MLP of `layer` reads. apply_ln: normalise; at the end by the whole
        final norm, so that `model.embed_out` gives the logits of each layer. pos_slice: of T, one,
        a list, a slice, or a tuple of a slice's arguments."""
        end, parts = self._up_to(layer), {}
        for at in range(end):
            parts[f"{at}_pre"] = self["resid_pre", at]
            if incl_mid:
                parts[f"{at}_mid"] = self["resid_mid", at]
        if end == self.layers:
            parts["final_post"] = self["resid_post", end - 1]
        else:
            parts[f"{end}_pre"] = self["resid_pre", end]
            if mlp_input:
                parts[f"{end}_mid"] = self["resid_mid", end]
        parts = {label: _at(part, pos_slice) for label, part in parts.items()}
        norm = (end, mlp_input, pos_slice, True) if apply_ln else None
        return self._stacked(parts, norm, return_labels)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Positions = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """Return the outputs that add up to the input of `layer` (None: of the final norm),
        (components, B, T, C): embedding, attention and MLP of each layer. mode: "all", "attn" or
        "mlp"."""
        if mode not in ("all", "attn", "mlp"):
            raise ValueError(f'mode must be "all", "attn" or "mlp", not {mode!r}')
        end, parts = self._up_to(layer), {}
        if incl_embeds:
            parts["embed"] = self["embed"]
        for at in range(end):
            if mode != "mlp":
                parts[f"{at}_attn_out"] = self["attn_out", at]
            if mode != "attn" and not getattr(self.model.config, "attention_only", False):
                parts[f"{at}_mlp_out"] = self["mlp_out", at]
        if mlp_input and mode != "mlp":
            parts[f"{end}_attn_out"] = self["attn_out", end]
        parts = {label: _at(part, pos_slice) for label, part in parts.items()}
        norm = (end, mlp_input, pos_slice) if apply_ln else None
        return self._stacked(parts, norm, return_labels)

    def stack_head_results(
        self,
        layer: int | None = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Positions = None,
        apply_ln: bool = False,
    ) -> Any:
        """Return what each head of the layers before `layer` (None: of all) adds to the stream,
        without biases, (L H, B, T, C) in float32. incl_remainder: and the rest of the stream."""
        end, parts = self._up_to(layer), {}
        if end == 0:
            raise ValueError("stack_head_results: before layer 0 there are no heads")
        for at in range(end):
            result = self["result", at]
            for head in range(result.shape[-2]):
                parts[f"L{at}H{head}"] = _at(result[..., head, :], pos_slice)
        if incl_remainder:
            whole = ops.astype(_at(self["resid_post", end - 1], pos_slice), "float32")
            parts["remainder"] = whole - ops.stack([*parts.values()]).sum(0)
        norm = (end, False, pos_slice) if apply_ln else None
        return self._stacked(parts, norm, return_labels)

    def _stacked(self, parts: dict[str, Tensor], norm: tuple | None, labels: bool) -> Any:
        """Return components in one Tensor, with their labels or without. norm: what
        apply_ln_to_stack takes with them; None leaves them as they are."""
        stack = ops.stack([*parts.values()])
        if norm is not None:
            stack = self.apply_ln_to_stack(stack, *norm)
        return (stack, [*parts]) if labels else stack

    def stack_activation(self, name: str, layer: int | None = None, part: str | None = None) -> Any:
        """Return one activation of all layers before `layer` (None: of all), (L, ...)."""
        return ops.stack([self[name, at, part] for at in range(self._up_to(layer))])

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Positions = None,
        recompute_ln: bool = False,
    ) -> Tensor:
        """Return components as the norm before `layer` (None: the final one) sees them: centred,
        and divided by the scale that the norm had for the whole stream, which is the same for all.
        Weight and bias of the norm are not applied. recompute_ln: apply the final norm itself, with
        the scale of each component."""
        end = self._up_to(layer)
        if recompute_ln and end == self.layers:
            return self.model.final_layer_norm(residual_stack)
        x = ops.astype(residual_stack, "float32")
        x = x - ops.mean(x, axes=-1, keepdims=True)
        at = ("scale",) if end == self.layers else ("scale", end, "ln2" if mlp_input else "ln1")
        return x / _at(self[at], pos_slice)

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: Any,
        incorrect_tokens: Any = None,
        pos_slice: Positions = None,
    ) -> Tensor:
        """Return what each component adds to the logit of `tokens`, or to its difference from that
        of `incorrect_tokens`: (components, B, T) in float32. tokens: one id or string; ids (B,),
        one for each text; or (B, T). The scale of the final norm is kept, its weight applied, its
        bias left out."""
        direction = self.model.token_directions(tokens)
        if incorrect_tokens is not None:
            other = self.model.token_directions(incorrect_tokens)
            if other.shape != direction.shape:
                raise ValueError(
                    f"logit_attrs: tokens {direction.shape[:-1]} and incorrect_tokens "
                    f"{other.shape[:-1]} must have one shape"
                )
            direction = direction - other
        stack = self.apply_ln_to_stack(residual_stack, pos_slice=pos_slice)
        if len(direction.shape) == 2 and len(stack.shape) == 4:  # one token for each text
            direction = direction.reshape((direction.shape[0], 1, direction.shape[1]))
        direction = direction * ops.astype(self.model.final_layer_norm.weight, "float32")
        return ops.summation(stack * direction, axes=-1)


def _at(x: Tensor, positions: Positions) -> Tensor:
    """Take positions of (..., T, C); a tuple has the arguments of a slice."""
    positions = slice(*positions) if isinstance(positions, tuple) else positions
    return x if positions is None else x[..., positions, :]
