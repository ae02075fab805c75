"""needle suite FILE: train a list of models; write their cards, and how to check their training."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from needle import hf
from needle.backend_ndarray import choose_device, cpu
from needle.command import Parser, flag_words, path, reporting
from needle.data import DataError, load_tokenizer
from needle.data.kinds import files_at
from needle.data.readers import open_tokens
from needle.files import described, printable, read_toml, replace_text
from needle.training.folder import Begun, read_description
from needle.training.replay.proofs import Log, git, read_manifest
from needle.training.replay.replays import finish, whole_steps
from needle.training.run import model_config
from needle.training.saved_run import SavedRun, open_run
from needle.training.settings import check_new, complete, located, option, parse, resumed

KEEP = {"keep": "log", "keep_optimizer": True}


def read_suite(file: Path) -> dict[str, list[str]]:
    """Return {name: flags} of the models of a suite. DataError for what is none."""
    suite = read_toml(file)
    shared, models = suite.pop("flags", {}), suite.pop("model", [])
    tables = [shared, *models] if isinstance(models, list) else [None]
    if suite or not models or not all(isinstance(table, dict) for table in tables):
        raise DataError(f"{file}: must hold a table [flags] and tables [[model]] alone")
    found: dict[str, list[str]] = {}
    for number, model in enumerate(models, 1):
        name, flags = model.get("name"), KEEP | shared | model
        if not isinstance(name, str) or name in found or flags.keys() & {"out", "resume"}:
            raise DataError(f"{file}: model {number}: needs its own `name`, and no out, no resume")
        given = {key: value for key, value in flags.items() if key != "name" and value is not False}
        words = ([option(k)] if v is True else flag_words(option(k), v) for k, v in given.items())
        found[name] = [word for flag in words for word in flag]
    return found


def check(name: str, flags: list[str], out: Path) -> int:
    """Return the steps of a run, new or begun. Raise ValueError or SystemExit for flags that the
    trainer would refuse, as far as it is known before text is tokenised."""
    given, folder = located(parse([*flags, *flag_words("--name", name)])), out / "runs" / name
    check_new(given)
    settings = complete(given, not choose_device(given.device).is_host, given.gpus or 1)
    if given.init is None:
        config = model_config(settings)
        hf.mapping_of(config.meta_model())  # of a model that transformers opens
    if settings.tokenizer is not None:
        load_tokenizer(settings.tokenizer)
    if given.data is not None and open_tokens(given.data) is None:
        files_at(Path(given.data))
    if (folder / "config.json").exists():
        settings = resumed(given, Begun(folder), folder)
    return settings.steps


# ---- what is written ---------------------------------------------------------------------------


def facts_of(run: SavedRun) -> dict[str, str]:
    """Return what card and page say of a run."""
    about, settings, known = read_description(run.folder), run.settings, read_manifest(run.folder)
    manifest = hashlib.sha256((run.folder / "manifest.json").read_bytes()).hexdigest()
    log = Log(run.folder / "metrics.jsonl")
    weights = log.proofs[max(log.proofs)]["digest"]["weights"]
    held_out = [line["val_loss"] for line in log.steps.values() if "val_loss" in line]
    prove, sequences = settings["prove"], settings["batch_size"] * settings["grad_accum"]
    return {
        "parameters": f"{about['parameters']:,}",
        "steps": f"{settings['steps']:,} of {sequences:,} x {settings['seq_len']:,} tokens",
        "learning rate": f"{settings['lr']:g}, {settings['schedule']}",
        "loss on held-out text": f"{held_out[-1]:.4f} nats a token" if held_out else "–",
        "data": f"`{about['data']['fingerprint']}`",
        "device": f"{known['device']}: {known['products']}",
        "needle": f"{known['versions']['needle']}, commit `{known['commit']}`",
        "checkpoints": ", ".join(map(str, run.steps)),
        "proven steps": f"those of checkpoints{f', each {prove:,}th' if prove else ''}",
        "SHA-256 of `manifest.json`": f"`{manifest}`",
        "weights of the last step": f"`{weights}`",
    }


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- {kind}
- needle
---

# {name}

| | |
|---|---|
{rows}

Trained by needle. `AutoModelForCausalLM.from_pretrained` of transformers opens this folder. Each
step can be computed again, and every bit compared: the README.md of the suite says how.
"""

PAGE = """# {title}

| model | parameters | needle | data | SHA-256 of `manifest.json` | weights of the last step |
|---|---|---|---|---|---|
{rows}

`models/` holds the last models, as transformers opens them. `runs/` holds each training:
`manifest.json` (settings, data, versions, commit, device), `metrics.jsonl` (a line a step, and a
chain of proofs), and whole checkpoints, from which it can go on.

## Check any interval

Install the needle of the table, at its commit (a + behind it: with changes that no commit has):

    git clone {origin} needle && git -C needle checkout COMMIT && pip install ./needle

Have the data there, DATA below, and choose a step A, 0 or one with a whole checkpoint, and a later
proven step B. `needle verify RUN --steps A:B --data DATA` trains the steps after A up to B again
and compares every bit with the run's; with A = 0, or `--full`, nothing is taken from a checkpoint.
Exit code 0: all is equal. 3: something differs; the first step, tensor and number are named. 4: it
cannot be decided here, for a reason that is named, such as another kind of GPU. The fingerprint of
the data is in `manifest.json`, the digest of weights in the last proof of `metrics.jsonl`: both are
checked.

{commands}
"""


def card(name: str, run: SavedRun) -> str:
    """Return the model card, as transformers and the Hugging Face hub read it."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts_of(run).items())
    kind = run.config.model_class.weight_mapping.MODEL_TYPE
    return CARD.format(name=name, kind=kind, rows=rows)


def page(title: str, runs: dict[str, SavedRun]) -> str:
    """Return the page of a suite."""
    keys = "parameters", "needle", "data", "SHA-256 of `manifest.json`", "weights of the last step"
    rows, commands = [], []
    for name, run in runs.items():
        facts, steps = facts_of(run), whole_steps(run.folder)
        cells = [f"[{name}]({quote(f'models/{name}')})", *(facts[key] for key in keys)]
        rows.append(f"| {' | '.join(cells)} |")
        interval = f"{steps[-2]}:{steps[-1]}"
        run_folder = shlex.quote(f"runs/{name}")
        commands.append(f"    needle verify {run_folder} --steps {interval} --data DATA")
    origin = git("remote", "get-url", "origin")
    origin = origin if ":" in origin else "REPOSITORY"  # no path of this machine
    texts = {"rows": "\n".join(rows), "commands": "\n".join(commands)}
    return PAGE.format(title=title, origin=origin, **texts)


# ---- the command -------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="needle suite", description="Train a list of models, or go on with it.")
    top.add_argument("file", type=path, metavar="FILE", help="the list, TOML (docs/replay.md)")
    text = "where they are written (default: beside FILE, by its name)"
    top.add_argument("--out", type=path, metavar="FOLDER", help=text)
    return top


@reporting("needle suite")
def main(argv: Sequence[str] | None = None) -> int:
    top = parser()
    args = top.parse_args(argv)
    models, steps, runs = read_suite(args.file), {}, {}
    if args.out is None and not args.file.suffix:
        top.error(f"--out: {args.file} has no suffix to leave out: name a folder")
    out = (args.out or args.file.with_suffix("")).resolve()

    def begin(name: str) -> None:
        steps[name] = check(name, models[name], out)

    def train(name: str) -> None:
        finish(out / "runs" / name, steps[name], "", models[name], quiet=False)
        runs[name] = run = open_run(out / "runs" / name)
        hf.save(run.model(steps[name], cpu()), out / "models" / name)
        replace_text(out / "models" / name / "README.md", card(name, run))

    for work, name in itertools.product((begin, train), models):
        try:
            work(name)
        except SystemExit:  # after its message
            print(printable(f"needle suite: {args.file}: model {name}"), file=sys.stderr)
            raise
        except (ValueError, OSError, RuntimeError) as error:
            raise RuntimeError(f"{args.file}: model {name}: {described(error)}") from error
    replace_text(out / "README.md", page(out.name, runs))
    print(printable(str(out / "README.md")))
    return 0
