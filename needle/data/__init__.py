"""Data: from files of text or tokens to batches.

tokens.py    ids in files that read as one flat array; the hash of data
kinds.py     which files a path names, and what each holds by its first bytes
tokenizer.py tokenizers with their special tokens
text.py      documents in files, and their ids
megatron.py  .bin/.idx, and GPT-NeoX's order of samples
readers.py   open_data: finds out what a path holds; the cache of text
batches.py   Batches: which sample comes when; position and seek
edits.py     the file of edits of a training, checked
edited.py    Edits: the batches that edits change
prefetch.py  Prefetch: batches made ahead on another thread, in pinned memory
runs.py      the data of a training run, as its config.json describes them
__main__.py  needle data prepare | inspect | view
dataset.py   DataLoader and NDArrayDataset: any arrays in memory, by batches
"""

from needle.data.batches import Batches
from needle.data.dataset import DataLoader, Dataset, NDArrayDataset
from needle.data.megatron import open_documents, sample_order
from needle.data.prefetch import Prefetch
from needle.data.readers import TokenData, cache_dir, open_data
from needle.data.runs import open_run_data, run_batches, run_data
from needle.data.text import standard_library, token_bytes, train_tokenizer
from needle.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from needle.data.tokens import DataError, Documents, FlatTokens

TensorDataset = NDArrayDataset  # PyTorch's name

__all__ = [
    "END_OF_TEXT",
    "Batches",
    "DataError",
    "DataLoader",
    "Dataset",
    "Documents",
    "FlatTokens",
    "NDArrayDataset",
    "Prefetch",
    "TensorDataset",
    "TokenData",
    "Tokenizer",
    "cache_dir",
    "load_tokenizer",
    "open_data",
    "open_documents",
    "open_run_data",
    "run_batches",
    "run_data",
    "sample_order",
    "standard_library",
    "token_bytes",
    "train_tokenizer",
]
