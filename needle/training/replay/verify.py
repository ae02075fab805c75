"""needle verify RUN: compare the files of a run with each other, then train steps again and compare
lines, proofs and checkpoints. docs/replay.md has what a verdict says."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needle.backend_ndarray import cpu, given_device
from needle.checkpoint import Checkpoint, list_checkpoints, step_of
from needle.command import Parser, argument_type, path, reporting, whole, wrapped
from needle.data import run_batches, run_data
from needle.data.tokens import SAMPLED
from needle.files import FileError, MissingFileError, reading, replace_text
from needle.processes import unwound_by_sigterm
from needle.safetensors import read_header
from needle.training.folder import check_state, described_config, read_description, read_settings
from needle.training.log import clock
from needle.training.replay import proofs
from needle.training.replay.replays import Replay, launcher, passed_on, read_replay, trained
from needle.training.run import products_of
from needle.training.settings import FREE, Settings, parse_beside, word

EQUAL, DIFFERS, UNDECIDED = "equal", "differs", "undecided"
CODES = {DIFFERS: 3, UNDECIDED: 4, EQUAL: 0}  # exit codes; the first that occurs counts
Interval = tuple[int, int]  # the steps after the first one, up to the second


@dataclasses.dataclass
class Verdict:
    """The verdict on a file or on steps."""

    of: str
    result: str
    text: str
    what: str | None = None
    step: int | None = None  # the first that differs
    scope: str = "taken from the files"
    tensor: dict[str, Any] | None = None  # the first that differs: name, index, run, here, count

    def __str__(self) -> str:
        at = "" if self.step is None else f", step {self.step}"
        what = "" if self.what is None else f" ({self.what}{at})"
        return f"{self.of}: {self.result}{what}: {self.text} [{self.scope}]"


class Claims:
    """What the files of a run say of it. given: flags of `needle train`."""

    def __init__(self, folder: Path, given: Settings) -> None:
        self.folder, self.log = folder, proofs.Log(folder / "metrics.jsonl")
        self.lines, self.proofs = self.log.steps, self.log.proofs
        self.settings, self.description = read_settings(folder), read_description(folder)
        self.manifest = proofs.read_manifest(folder) or {}
        self.files = {step_of(path): path for path in list_checkpoints(folder / "checkpoints")}
        self.kept = list_checkpoints(folder / "checkpoints", "weights")[::-1]
        self.states: dict[int, dict[str, Any]] = {}  # of whole checkpoints, each of its step
        self.compared: set[str] = set()  # names of their files, of damaged ones and of `kept`
        self.good = {0}  # steps from which a repetition can begin
        self.replay = read_replay(folder)
        fixed = self.settings.get("schedule") != "constant"  # else a run may go on
        self.until = self.settings["steps"] if fixed else max(self.lines, default=0)
        if not self.description.get("data"):
            raise FileError(f"{folder / 'config.json'}: it describes no data of a run")
        self.data = self.description["data"] | ({"path": given.data} if given.data else {})
        self.order = "data" if SAMPLED in self.data["fingerprint"] else "order"  # of the batches
        model = described_config(folder / "config.json").meta_model(given_device(given.device))
        if self.settings.get("fp8"):
            model.use_fp8()
        self.products, self.commit = products_of(model), proofs.commit()  # here

    def foreign(self, *facts: dict[str, Any]) -> tuple[str, str] | None:
        """Return what of this machine is not as a checkpoint's state or the manifest says, and a
        text."""
        said = (one.get("products") or self.products for one in facts)
        if theirs := next((products for products in said if products != self.products), None):
            gpus = {text.split(", ")[0].partition(" on ")[2] for text in (theirs, self.products)}
            what = "GPU kind" if len(gpus) == 2 else "library or table"
            return what, f"the run multiplied by {theirs}, this machine by {self.products}"
        theirs = self.manifest.get("commit") or self.commit
        if theirs != self.commit:
            return "commit", f"the run was begun by commit {theirs}, this is {self.commit}"
        return None


# ---- the files ---------------------------------------------------------------------------------


def check_lines(claims: Claims) -> Verdict:
    """Check that metrics.jsonl has each step, and its chain of proofs."""
    steps, log = sorted(claims.lines), claims.log
    form = "a line from step {} to {} was changed, cut or put in".format
    wrong = [(a + 1, form(a + 1, b)) for a, b in log.broken]
    cut = [number for number, step in enumerate(steps, 1) if step != number][:1]
    wrong += [(step, f"there is no line of step {step}") for step in cut]
    wrong += [(step, f"a line after step {step} {what}") for step, what in log.strange]
    beyond = [step for step in steps if step > claims.until][:1]
    wrong += [(s, f"the run has {claims.until} steps, but a line of step {s}") for s in beyond]
    if wrong:
        text = "; ".join(text for _, text in wrong)
        return Verdict("metrics.jsonl", DIFFERS, text, "line", min(wrong)[0])
    after = sum(step > max(claims.proofs, default=0) for step in steps)
    text = f"{len(steps):,} steps, {len(claims.proofs):,} proofs in a chain, {after:,} steps behind"
    return Verdict("metrics.jsonl", EQUAL, text)


def check_settings(claims: Claims) -> Verdict:
    """Check that config.json, manifest.json and the checkpoints say the same, as far as it decides
    the steps. No repetition can begin with a checkpoint that says something else than config.json.
    """
    free = {word(name) for name in FREE}
    free |= {"steps", "samples"} if claims.settings.get("schedule") == "constant" else set()

    def said(facts: dict[str, Any]) -> dict[str, Any]:
        parts = [(part, facts.get(part)) for part in ("settings", "model", "optimizer", "data")]
        pairs = [(part, name) for part, x in parts if isinstance(x, dict) for name in x]
        return {f"{a}.{b}": proofs.canonical(facts[a][b]) for a, b in pairs if b not in free}

    files = {"manifest.json": (0, claims.manifest)} if claims.manifest else {}
    for step, state in claims.states.items():
        optimizer = {name: x for name, x in state["optimizer"].items() if name != "lr"}
        facts = {"settings": state["settings"], "model": state["config"], "optimizer": optimizer}
        facts["data"] = {"fingerprint": state["fingerprint"]}
        files[claims.files[step].name] = step, facts
    own, places = said(claims.description), {}
    for file, (step, facts) in files.items():
        wrong = [(name, x) for name, x in said(facts).items() if own.get(name, x) != x]
        for name, x in wrong:
            places.setdefault(f"{name} is {own[name]} in config.json, {x} in", []).append(file)
        if wrong and step > 0:  # the initial state is computed
            claims.good.discard(step)
    if places:
        text = "; ".join(f"{fact} {', '.join(names)}" for fact, names in places.items())
        what = "data" if all(fact.startswith("data.") for fact in places) else "settings"
        return Verdict("settings", DIFFERS, text, what)
    more = "" if claims.manifest else "; there is no manifest.json"
    return Verdict("settings", EQUAL, f"the same in {', '.join(['config.json', *files])}{more}")


def check_data(claims: Claims) -> Verdict:
    """Check the tokens, and the batch of each line of proof."""
    described, other = claims.data, None
    verdict = functools.partial(Verdict, "data", scope="read here")
    try:
        data = run_data(described, claims.folder, described["fingerprint"])
    except MissingFileError as error:
        return verdict(UNDECIDED, f"{error}: --data PATH names another place")
    except FileError as error:
        data, other = run_data(described, claims.folder), str(error)
    every = described["micro_batches"]
    try:
        batches = run_batches(data, described, described["id_limit"])
        if claims.proofs:  # a position knows the order of the data
            batches.seek(claims.proofs[max(claims.proofs)]["position"])
        if claims.replay is not None:
            claims.replay.begin(data, batches, every)
        for step, proof in sorted(claims.proofs.items()):
            batches.seek_batch((step - 1) * every)
            found = proofs.batch_hash(batches, batches.position, every)
            if found != proof.get("batch"):
                text = f"its line of proof has the batch {proof.get('batch')}, not {found}"
                return verdict(DIFFERS, text, "data" if other else claims.order, step)
    except FileError as error:  # the tokens have no such position, ids or documents
        if not other:
            return verdict(DIFFERS, str(error), claims.order)
    if other:
        return verdict(DIFFERS, other, "data")
    return verdict(EQUAL, f"the tokens, and the batches of {len(claims.proofs):,} lines of proof")


def check_checkpoint(claims: Claims, step: int) -> list[Verdict]:
    """Check that a checkpoint is whole, of its step, and what its line of proof says."""
    file, proof, found = claims.files[step], claims.proofs.get(step), []
    differs = lambda text, what: Verdict(file.name, DIFFERS, text, what, step)
    try:
        checkpoint = Checkpoint(file)
        check_state(checkpoint)
        digests = proofs.digests_of(checkpoint)
    except MissingFileError:
        return [Verdict(file.name, UNDECIDED, "it was removed since: the run goes on", step=step)]
    except FileError as error:
        claims.compared.add(file.name)
        return [differs(str(error), "file")]
    state = checkpoint.state
    if state["step"] != step:
        return [differs(f"it is of step {state['step']}", "file")]
    claims.states[step] = state
    claims.compared.add(file.name)
    proven = {} if proof is None else proof["digest"]
    if step == 0 and "weights" in claims.manifest:
        proven = {"weights": claims.manifest["weights"]}
    elif proof is None and "weights" in claims.manifest:
        found.append(differs("its line of proof is cut from metrics.jsonl", "line"))
    elif proof is not None and proof["position"] != state["data"]:
        text = f"its position is {state['data']}, in its line of proof {proof['position']}"
        found.append(differs(text, "order"))
    if wrong := [name for name in proven if digests.get(name) != proven[name]]:
        text = f"the digest of {', '.join(wrong)} is another one than in its line of proof"
        found.append(differs(text, "moments" if {*wrong} <= {"m", "v"} else "weights"))
    claims.good |= {step} - {step for _ in found}
    return found or [Verdict(file.name, EQUAL, "whole" + "; digests" * bool(proven))]


def check_weights(claims: Claims, file: Path) -> Verdict:
    """Check that the weights of --keep in a file are whole, and of their step."""
    try:
        wrong, step = None, Checkpoint(file).state.get("step")
    except FileError as error:
        wrong, step = str(error), None
    claims.compared.add(file.name)
    if step != step_of(file):
        text = wrong or f"it is of step {step}"
        return Verdict(file.name, DIFFERS, text, "file", step_of(file))
    return Verdict(file.name, EQUAL, "whole")


# ---- steps -------------------------------------------------------------------------------------


def check_steps(claims: Claims, interval: Interval, launch: str, flags: Sequence[str]) -> Verdict:
    """Train steps again, and compare what they leave with what the run has."""
    (first, last), parent, own = interval, claims.folder.resolve(), claims.manifest.get("weights")
    of = claims.replay or Replay(str(parent), None, first, first, last, [])
    again = dataclasses.replace(of, parent=str(parent), manifest=None, base=first, stop=last)
    if claims.kept:  # a resume may have changed the --keep of config.json
        saved = sorted({*claims.files, *map(step_of, claims.kept)})
        flags = ["--keep", ",".join(map(str, saved)), *flags]
    with trained(again, launch, flags) as (folder, wrong):
        here = reversed(list_checkpoints(folder / "checkpoints", "step|weights"))
        files = [file for file in here if file.name in claims.compared]
        files = [file for file in files if step_of(file) > first or file.stem == "weights_0"]
        places = [claims.folder / "checkpoints" / file.name for file in files]
        both = zip(map(step_of, files), map(_first_number, places, files))
        tensors = {step: tensor for step, tensor in both if tensor is not None}
        weights = (proofs.read_manifest(folder) or {}).get("weights", own)
        both_proven = proofs.Log(folder / "metrics.jsonl").proofs.keys() & claims.proofs.keys()
    if own not in (None, weights):
        wrong = {0: {"digest of weights": (own, weights)}, **wrong}
    steps, state = range(first + 1, last + 1), claims.states.get(last, {})
    lines, proven = (len({*steps} & known) for known in (claims.lines.keys(), both_proven))
    text = f"{lines:,} line(s), {proven:,} proof(s), {len(files):,} checkpoint(s)"
    beginning = f"the checkpoint of step {first}" if first else "the initial state"
    verdict = Verdict(_steps(interval), EQUAL, text, scope=f"recomputed here from {beginning}")
    if not wrong and not tensors:
        foreign = claims.foreign(state, claims.manifest)
        verdict.text += f"; {foreign[1]}" if foreign else ""
        return verdict
    verdict.result, verdict.step = DIFFERS, min([*wrong, *tensors])
    pairs = sorted(wrong.get(verdict.step, {}).items(), key=lambda pair: len(str(pair[1][0])))
    says = [f"{key} is {str(a):.24}, recomputed {str(b):.24}" for key, (a, b) in pairs]
    if tensors:
        verdict.tensor = tensors[min(tensors)]
        form = "{name}{index} is {run}, recomputed {here}; in all {count:,} numbers differ"
        says.insert(0, form.format(**verdict.tensor))
    verdict.text = f"{'; '.join(says)}; of {text}"
    whole = {step_of(file) for file in files if file.stem.startswith("step")}
    verdict.what = _what(wrong, tensors, {0, *tensors} | ({last} - whole)) or claims.order
    if verdict.what != "line" and (foreign := claims.foreign(state or claims.manifest)):
        verdict.result, verdict.what = UNDECIDED, foreign[0]
        verdict.text += f"; {foreign[1]}, and one as the run's decides"
    return verdict


def _steps(interval: Interval) -> str:
    return f"steps {interval[0] + 1} to {interval[1]}"


def _what(wrong: dict[int, dict], tensors: dict[int, dict], deciding: set[int]) -> str | None:
    """Return what differs first; None for the batches. wrong: of the lines of each step; tensors:
    of each checkpoint; deciding: the steps whose weights and moments are known beside the lines."""
    of = "digest of "
    slots = {step: {key for key in keys if of in key} for step, keys in wrong.items()}
    for step, tensor in tensors.items():
        kind, slot, *_ = f"{tensor['name']}.".split(".")
        slots[step] = {of + slot if kind == "optimizer" else "weights"}
    if not any(slots.get(step) for step in deciding):
        return "line"
    if "lr" in wrong.get(min(slots), {}):
        return "learning rate"
    if any(keys.keys() & {"batch", "position"} for keys in wrong.values()):
        return None
    first = next(slots[step] for step in sorted(slots) if slots[step])
    return "moments" if first <= {of + "m", of + "v"} else "weights"


def _first_number(run: Path, here: Path) -> dict[str, Any] | None:
    """Return where two checkpoints first have different numbers: name of the tensor, index, both
    values, and how many numbers of all tensors differ; None for equal ones, and where the run's has
    no header. Its checksum may be wrong."""
    try:
        with reading(run) as file:
            theirs = {entry.name: entry for entry in read_header(file)[1]}
    except FileError:
        return None
    found, count = {}, 0
    for name, own in Checkpoint(here).tensors.items():
        if name in theirs and theirs[name].shape == own.shape:
            pair = theirs[name], own
            wrong = np.not_equal(*(x.words().view(f"u{x.words().itemsize}") for x in pair))
            if wrong.any() and not found:
                index = np.unravel_index(int(wrong.argmax()), wrong.shape)
                a, b = (float(x.read(cpu()).astype("float32").numpy()[index]) for x in pair)
                found = {"name": name, "index": [*map(int, index)], "run": a, "here": b}
            count += int(wrong.sum())
    return found | {"count": count} if found else None


# ---- the command -------------------------------------------------------------------------------


def intervals_of(claims: Claims, args: argparse.Namespace) -> list[Interval]:
    """Return the intervals to train again."""
    starts = sorted({*claims.files} - {0})
    found, last = [*zip([0, *starts], starts)], max([*claims.proofs, *starts], default=0)
    if args.full:
        return [(0, last)] if last else []
    if args.steps is not None:
        if args.steps[0] not in (0, *starts) or args.steps[1] > last:
            text = f"begin with one of {[0, *starts]} and end at {last} or before"
            raise FileError(f"--steps: of {claims.folder} it can {text}")
        return [args.steps]
    if args.sample is not None:
        return sorted(random.Random(args.seed).sample(found, min(args.sample, len(found))))
    return found


def verified(
    claims: Claims, intervals: list[Interval], launch: str = "", flags: Sequence[str] = ()
) -> Iterator[Verdict]:
    """Yield the verdicts on the files of a run, then on intervals of its steps."""
    yield check_lines(claims)
    yield (data := check_data(claims))
    for step in sorted(claims.files):
        if any(first <= step <= last for first, last in intervals):
            yield from check_checkpoint(claims, step)
    for file in claims.kept:
        if any(first <= step_of(file) <= last for first, last in intervals):
            yield check_weights(claims, file)
    yield check_settings(claims)
    known = sorted({*claims.proofs, *claims.states})
    for first, last in intervals:
        reason = None
        if first not in claims.good or first and not claims.files[first].exists():
            what = "is gone, or not as config.json or its proof says"
            reason = f"the checkpoint of step {first} {what}"
        elif last not in known:
            reason = f"step {last} has no checkpoint and no proof; of {known} the next one decides"
        elif data.result != EQUAL and data.what != "order":
            reason = "the run's data decide"
        elif first == 0 and not Path(claims.settings.get("init") or ".").exists():
            reason = f"the first model is that of {claims.settings['init']}, which is not here"
        if reason is None:
            yield check_steps(claims, (first, last), launch, flags)
        else:
            yield Verdict(_steps((first, last)), UNDECIDED, reason, scope="not computed")
    if not intervals:
        text = "there is no checkpoint: --full decides"
        yield Verdict("steps", UNDECIDED, text, scope="not computed")


@argument_type
def _interval(text: str) -> Interval:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"must be two steps A:B, A before B, not {text!r}")
    return int(first), int(last)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="needle verify", description="Repeat steps of a run, and compare the bits.")
    top.epilog = "Other flags are those of needle train: --device, --gpus ... Exit codes: 0 equal; "
    top.epilog += "1 an error; 3 something differs; 4 nothing differs, something is undecided."
    add = top.add_argument
    add("run", type=path, metavar="RUN", help="the folder of the run")
    which = top.add_mutually_exclusive_group()
    text = (
        "from the checkpoint of step A, or 0, to step B (default: from 0 to the last checkpoint, "
    )
    text += "each stretch from the checkpoint before)"
    which.add_argument("--steps", type=_interval, metavar="A:B", help=text)
    which.add_argument("--sample", type=whole(1), metavar="K", help="K intervals, drawn by --seed")
    text = "from the initial state, by no state of a checkpoint"
    which.add_argument("--full", action="store_true", help=text)
    add("--seed", type=whole(0), metavar="S", help="of --sample (default: random)")
    add("--json", type=path, metavar="FILE", help="write plan and verdicts")
    add("--dry-run", action="store_true", help="print the plan and its price")
    add("--launch", type=launcher, default="", metavar="WORDS", help='as "mpirun -n 2", before it')
    return top


@reporting("needle verify")
@unwound_by_sigterm()
def main(argv: Sequence[str] | None = None) -> int:
    top = parser()
    args, flags = parse_beside(top, argv)
    if args.seed is not None and args.sample is None:
        top.error("argument --seed: needs --sample")
    args.seed = secrets.randbelow(1 << 32) if args.seed is None else args.seed
    claims = Claims(args.run, passed_on(flags))
    intervals = intervals_of(claims, args)
    line = claims.lines.get(max(claims.lines, default=0), {})
    count = sum(last - first for first, last in intervals)
    plan = {
        "run": str(args.run),
        "intervals": intervals,
        "seed": None if args.sample is None else args.seed,
        "steps": count,
        "seconds": round(count * line.get("seconds", 0) / line.get("step", 1)),
        "device": claims.description.get("device", {}).get("name"),
        "products": claims.products,
    }
    text = "{0} intervals, {steps:,} steps: {1} (m:ss) at the rate of the run, on {device}"
    text = text.format(len(intervals), clock(plan["seconds"]), **plan)
    text += "" if plan["seed"] is None else f"; drawn by --seed {args.seed}"
    print(wrapped("\n".join([text, *map(_steps, intervals)])), flush=True)
    verdicts = []
    for verdict in verified(claims, intervals, args.launch, flags) if not args.dry_run else ():
        verdicts.append(verdict)
        print(wrapped(str(verdict)), flush=True)
    if args.json is not None:
        result = {"plan": plan, "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts]}
        replace_text(args.json, f"{proofs.to_text(result)}\n")
    results = {EQUAL, *(verdict.result for verdict in verdicts)}
    return next(code for result, code in CODES.items() if result in results)
