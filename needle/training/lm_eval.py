"""needle as a model of the LM evaluation harness (Gao et al., the package `lm_eval`).

    needle lm_eval --model needle --model_args pretrained=runs/tiny --tasks lambada_openai

takes every word of the command line of `lm_eval`, which knows the models of its own table alone and
offers no way to add one from outside. In Python, `import needle.training.lm_eval` registers the
model: lm_eval.simple_evaluate(model="needle", model_args={"pretrained": ...}) works after it.

Scores are those of the harness' own `hf` model on the same weights. Context and continuation are
encoded together and cut at the context's length. An empty context is the tokenizer's BOS token (or
EOS where it has none). A context that is too long loses its left end. Long texts are read in the
harness' rolling windows.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

try:
    import lm_eval.models  # noqa: F401  first: the harness registers its own only into an empty list
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import MODEL_REGISTRY, register_model
    from lm_eval.models.utils import Collator, normalize_gen_kwargs
except ImportError as error:
    raise ImportError(
        f"the LM evaluation harness is not here ({error}): {sys.executable} -m pip install lm_eval"
    ) from error
from tqdm import tqdm

from needle.command import wrapped
from needle.data import load_tokenizer
from needle.files import FileError
from needle.generation import generate_text
from needle.models import LanguageModel
from needle.training import evaluate

AUTO_TOKENS = 16384  # in a batch of batch_size=auto


class NeedleLM(TemplateLM):
    """A model as the harness sees it.

    pretrained: a checkpoint, the folder of a run, or a folder that transformers saved; or a model.
    tokenizer: a tokenizer.json or the folder of one, by default what came with `pretrained`.
    end_of_text: the token that ends a text, by default as the tokenizer's files name it.
    device: auto, cpu, cuda or cuda:INDEX; cuda:0, which the harness asks for by default, is the CPU
    on a machine without a GPU, as it is to `hf`. dtype: float32, bfloat16 or float16, by default
    that of the checkpoint. max_length: tokens of context, at most (and by default) max_seq_len.
    batch_size: a number, or auto. add_bos_token: False keeps the tokenizer from adding special
    tokens; True begins each text with the token that begins one, whatever the tokenizer adds.
    prefix_token_id: the token for an empty context.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike | LanguageModel,
        tokenizer: str | os.PathLike | None = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        end_of_text: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, LanguageModel):
            self.model, beside = pretrained, pretrained.tokenizer
        else:
            device = "auto" if device in (None, "cuda:0") else device
            self.model, beside = evaluate.load_model(
                pretrained,
                evaluate.choose_device(device),
                None if dtype in (None, "auto") else dtype,
            )
        if not (tokenizer or beside):
            raise ValueError(
                f"needle: no tokenizer.json lies with {pretrained}; give "
                "tokenizer=PATH in --model_args"
            )
        self.tokenizer = load_tokenizer(tokenizer or beside, end_of_text)
        self._device = self.model.device
        self._add_special = True if add_bos_token is None else bool(add_bos_token)
        begin = self.tokenizer.bos_token_id if add_bos_token else None
        self._begin = [] if begin is None else [begin]
        limit = self.model.config.max_seq_len
        self.max_length = limit if max_length is None else int(max_length)
        if not 1 <= self.max_length <= limit:
            raise ValueError(f"needle: max_length must be from 1 to {limit}, not {max_length}")
        if str(batch_size).startswith("auto"):
            batch_size = min(max(1, AUTO_TOKENS // self.max_length), max_batch_size or AUTO_TOKENS)
        self.batch_size = int(batch_size)
        if self.eot_token_id is None:
            raise ValueError(f"needle: {self.tokenizer}; give end_of_text=TOKEN in --model_args")
        prefixes = prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id
        self._prefix = int(next(one for one in prefixes if one is not None))

    # ---- methods that the harness calls -----------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.source.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": self.model.config.dtype,
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if add_special_tokens is None:
            begun = string.startswith(self.tok_decode([self.prefix_token_id], False))
            add_special_tokens = self._add_special and not begun
        begin = self._begin if add_special_tokens else []
        added = add_special_tokens and not begin
        return begin + self.tokenizer.encode(string, add_special_tokens=added).ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    # ---- likelihoods --------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(log-probability, is it what greedy decoding writes) of each (key, context,
        continuation)."""
        rows = []
        for _, context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"needle: a continuation of {len(continuation)} tokens; there "
                    f"must be 1 to max_length, {self.max_length}"
                )
            rows.append(((context + continuation)[-(self.max_length + 1) :][:-1], continuation))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        with tqdm(
            total=len(rows), desc="Running loglikelihood requests", disable=disable_tqdm
        ) as bar:
            for index, logprobs, hits in evaluate.score(self.model, rows, self.batch_size):
                answers[index] = (float(logprobs.sum(dtype="float64")), bool(hits.all()))
                if requests[index][0] is not None:  # None: a window of a text, no request
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
                bar.update(1)
        return answers

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        rows, owners = [], []
        for owner, request in enumerate(requests):
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                rows.append((None, *utils.make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(rows, disable_tqdm)):
            totals[owner] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # ---- generation ---------------------------------------------------------------------------

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        asked = []
        for request in requests:
            text, options = request.args[0], _options(request.args[1])
            capacity = self.max_length - options["max_new_tokens"]
            if capacity < 1:
                raise ValueError(
                    f"needle: {options['max_new_tokens']} tokens to generate leave no room for a "
                    f"prompt: max_length is {self.max_length}"
                )
            # An empty prompt becomes the same as an empty context.
            ids = self.tok_encode(text)[-capacity:] or [self.prefix_token_id]
            asked.append((ids, options, request.args))
        # Prompts that are continued in the same way, alike in length, longest first.
        groups = Collator(asked, lambda one: -len(one[0]), group_by="gen_kwargs")
        written = []
        with tqdm(
            total=len(requests), desc="Running generate_until requests", disable=disable_tqdm
        ) as bar:
            for batch in groups.get_batched(self.batch_size):
                prompts, options, arguments = zip(*batch)
                # Random numbers are NumPy's global stream, which the harness seeds.
                texts = generate_text(self.model, self.tokenizer, prompts, **options[0])
                for one, text in zip(arguments, texts):
                    self.cache_hook.add_partial("generate_until", one, text)
                written += texts
                bar.update(len(batch))
        return groups.get_original(written)


if "needle" not in MODEL_REGISTRY:
    register_model("needle")(NeedleLM)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Return a task's `generation_kwargs` as arguments of generate_text."""
    given = {name: value for name, value in given.items() if value is not None}
    given = dict(normalize_gen_kwargs(given))
    del given["do_sample"]  # where it is False, the temperature is 0 now
    options = {
        "max_new_tokens": given.pop("max_gen_toks"),
        "stop_strings": [stop for stop in given.pop("until") if stop],
        "temperature": float(given.pop("temperature", 0.0)),
        "top_k": int(given.pop("top_k", 0)) or None,
        "top_p": given.pop("top_p", None),
        "repetition_penalty": float(given.pop("repetition_penalty", 1.0)),
    }
    if given:
        raise ValueError(
            f"needle: generate_until cannot do {', '.join(sorted(given))}; it knows until, "
            "max_gen_toks, max_new_tokens, max_tokens, max_completion_tokens, do_sample, "
            "temperature, top_k, top_p and repetition_penalty"
        )
    return options


def main() -> int:
    """The harness' command line; its help begins with the model that it has here."""
    from lm_eval.__main__ import cli_evaluate

    if {"-h", "--help"} & {*sys.argv}:
        print("needle lm_eval is lm-eval with --model needle, whose --model_args are\n")
        arguments = inspect.cleandoc(NeedleLM.__doc__).split("\n\n", 1)[1]
        print(wrapped(arguments.replace("\n", " ")), end="\n\n")
    try:
        cli_evaluate()
    except FileError as error:  # of a checkpoint or a tokenizer
        print(f"needle lm_eval: {error}", file=sys.stderr)
        return 1
    return 0
