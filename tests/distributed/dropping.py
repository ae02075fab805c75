"""A model that drops, for runs with --import: 2,048 elements a micro-batch of 2 x 32 by NumPy, and
98,304 by Philox."""

from dataclasses import dataclass

from needle import nn
from needle.models import Config, LanguageModel, register


@dataclass(frozen=True)
class DroppingConfig(Config):
    vocab_size: int = 256
    hidden_size: int = 32
    max_seq_len: int = 32
    dtype: str = "float32"

    @classmethod
    def presets(cls):
        return {"dropping": {}}


@register("dropping-family")
class Dropping(LanguageModel):
    config_class = DroppingConfig

    def __init__(self, config, device=None):
        super().__init__(config, device)
        place = self.device, config.dtype
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, *place)
        self.small = nn.Dropout(0.1)
        self.wide = nn.Linear(config.hidden_size, 1536, False, *place)
        self.large = nn.Dropout(0.3)
        self.back = nn.Linear(1536, config.hidden_size, False, *place)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, False, *place)

    def hidden(self, ids, cache=None):
        x = self.small(self.embedding(ids))
        return x + self.back(self.large(self.wide(x)))
