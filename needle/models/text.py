"""Text in the place of token ids: `model("text")`, to_tokens, to_string, by the model's tokenizer.

`model.tokenizer` is a `tokenizers.Tokenizer`, a tokenizer of transformers, or the path of a
tokenizer.json or of a folder that holds one. A model that was loaded has the one beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray


class Texts:
    """The methods of a language model that take or give text. They have TransformerLens' names."""

    tokenizer: Any = None
    _opened: tuple[Any, Any] = (None, None)  # the value of `tokenizer`, and the Tokenizer

    def _tokenizer(self) -> Any:
        given = self.tokenizer
        if given is None:
            raise ValueError(
                f"{type(self).__name__} has no tokenizer, so it takes ids: set model.tokenizer to "
                "a tokenizers.Tokenizer, or to the path of a tokenizer.json"
            )
        if self._opened[0] is not given:
            from needle.data import load_tokenizer

            self._opened = (given, load_tokenizer(given))
        return self._opened[1]

    def _end(self) -> int:
        from needle.data import END_OF_TEXT

        end = self._tokenizer().token_to_id(END_OF_TEXT)
        if end is None:
            raise ValueError(f"the tokenizer of this model has no token {END_OF_TEXT}")
        return end

    def to_tokens(self, text: str | Sequence[str], prepend_bos: bool = False) -> np.ndarray:
        """Return the ids of one text (1, T) or of several (B, T) in int32. Shorter texts are filled
        up at their end with the end-of-text token, which changes nothing before it. prepend_bos:
        begin with that token, which TransformerLens does by default and Pythia's training did not.

        >>> config = ndl.PythiaConfig(vocab_size=280, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> model.tokenizer = ndl.data.train_tokenizer(iter(["the cat sat on the mat "] * 9), 280)
        >>> model.to_str_tokens("the cat")
        ['the', ' cat']
        >>> model.to_string(model.to_tokens(["the cat", "mat"])[0])
        'the cat'
        >>> logits, loss = model("the cat sat")
        """
        tokenizer = self._tokenizer()
        several = isinstance(text, Iterable) and not isinstance(text, str)
        texts = list(text) if several else [text]
        if not all(isinstance(one, str) for one in texts):
            raise TypeError(f"to_tokens takes a text or a list of texts, not {text!r:.60}")
        rows = [tokenizer.encode(one, add_special_tokens=False).ids for one in texts]
        if prepend_bos:
            rows = [[self._end(), *row] for row in rows]
        longest = max(map(len, rows), default=0)
        filled = [row + [self._end()] * (longest - len(row)) if len(row) < longest else row
                  for row in rows]  # fmt: skip
        return np.array(filled, np.int32).reshape(len(rows), longest)

    def to_string(self, tokens: Any) -> str | list[str]:
        """Return the text of ids (T,), or a list of texts of ids (B, T)."""
        ids = _on_host(tokens)
        if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0):
            raise ValueError(f"to_string takes ids, whole numbers of 0 or more, not {tokens!r:.60}")
        decode = self._tokenizer().decode
        if ids.ndim < 2:
            return decode(ids.reshape(-1).tolist(), skip_special_tokens=False)
        return [decode(row.tolist(), skip_special_tokens=False) for row in ids]

    def to_str_tokens(self, text: Any, prepend_bos: bool = False) -> list[str]:
        """Return the text of each token of a text, or of ids (T,) or (1, T)."""
        ids = self.to_tokens(text, prepend_bos)[0] if isinstance(text, str) else _on_host(text)
        return [str(self.to_string(np.array([one]))) for one in ids.reshape(-1)]

    def to_single_token(self, text: str) -> int:
        """Return the id of a text that is one token. ValueError for any other."""
        ids = self.to_tokens(text)[0]
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens, {self.to_str_tokens(text)}, not one")
        return int(ids[0])


def _on_host(tokens: Any) -> np.ndarray:
    return tokens.numpy() if isinstance(tokens, (Tensor, NDArray)) else np.asarray(tokens)
