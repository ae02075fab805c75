"""Text in the place of token ids: `model("text")`, to_tokens, to_string, by the model's tokenizer.

`model.tokenizer` is a needle.data.Tokenizer, or None. It is set to anything that load_tokenizer
takes: a path, a `tokenizers.Tokenizer`, a tokenizer of transformers. A model that was loaded has
the one that came with its weights, and save_checkpoint and save_pretrained write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from needle.data.tokenizer import Tokenizer, load_tokenizer


class Texts:
    """The methods of a language model that take or give text. They have TransformerLens' names."""

    # The files that came with the weights: special tokens may do so without a tokenizer.json.
    text_files: Tokenizer = Tokenizer({})

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.text_files if "tokenizer.json" in self.text_files.files else None

    @tokenizer.setter
    def tokenizer(self, given: Any) -> None:
        self.text_files = Tokenizer({}) if given is None else load_tokenizer(given)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{type(self).__name__} has no tokenizer, so it takes ids: set model.tokenizer to "
                "a tokenizers.Tokenizer, or to the path of a tokenizer.json"
            )
        return self.tokenizer

    def _first_known(self, *ids: int | None) -> int:
        """The first of these ids of special tokens that is known. ValueError if none is."""
        for one in ids:
            if one is not None:
                return one
        raise ValueError(
            f"{self.tokenizer}; in Python: ndl.data.load_tokenizer(path, end_of_text=...)"
        )

    def to_tokens(self, text: str | Sequence[str], prepend_bos: bool = False) -> np.ndarray:
        """Return the ids of one text (1, T) or of several (B, T) in int32. Shorter texts are filled
        up at their end with the tokenizer's padding, else its end of text, which changes nothing
        before it. prepend_bos: begin with its beginning of a text, else its end, which
        TransformerLens does by default and Pythia's training did not.

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
        rows = [tokenizer.encode(one, add_special_tokens=False).ids for one in texts]
        if prepend_bos:
            begin = self._first_known(tokenizer.bos_token_id, tokenizer.eos_token_id)
            rows = [[begin, *row] for row in rows]
        longest = max(map(len, rows), default=0)
        if any(len(row) < longest for row in rows):
            padding = self._first_known(tokenizer.pad_token_id, tokenizer.eos_token_id)
            rows = [row + [padding] * (longest - len(row)) for row in rows]
        return np.array(rows, np.int32).reshape(len(rows), longest)

    def to_string(self, tokens: Any) -> str | list[str]:
        """Return the text of ids (T,), or a list of texts of ids (B, T)."""
        ids, decode = np.asarray(tokens), self._tokenizer().decode
        rows = ids if ids.ndim > 1 else ids.reshape(1, -1)
        texts = [decode(row.tolist(), skip_special_tokens=False) for row in rows]
        return texts if ids.ndim > 1 else texts[0]

    def to_str_tokens(self, text: Any, prepend_bos: bool = False) -> list[str]:
        """Return the text of each token of a text, or of ids (T,) or (1, T)."""
        ids = self.to_tokens(text, prepend_bos)[0] if isinstance(text, str) else np.asarray(text)
        return [str(self.to_string(np.array([one]))) for one in ids.reshape(-1)]

    def to_single_token(self, text: str) -> int:
        """Return the id of a text that is one token. ValueError for any other."""
        ids = self.to_tokens(text)[0]
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens, {self.to_str_tokens(text)}, not one")
        return int(ids[0])
