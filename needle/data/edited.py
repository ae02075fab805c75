"""Edits: the sequences that a run draws once its data are edited (edits.py reads the edits).

    an edit -> the new Text of each place: documents, sequences
    epoch   -> its EditedStream, in which documents are stretches that are replaced
    batch   -> its rows; those that an edit reaches are read from there, or are sequences

A stretch that becomes longer or shorter (fill = "shift") moves the ids behind it. The stream keeps
its length: what is too much at its end is not read, what is missing is read from its beginning, as
np.resize does it. So epochs, the order of the samples and positions stay. An id whose loss is 0 as
a target is stored as its complement, ~id.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from needle.data.batches import Batches
from needle.data.edits import TRAINING, merged
from needle.data.readers import TokenData
from needle.data.tokens import DataError, Documents, borders_of, to_ids

BLOCK = 1 << 22  # sequences that are looked at together


class Text(NamedTuple):
    """Ids, read when a batch needs them."""

    length: int
    read: Callable[[], np.ndarray]


class Places(dict):
    """Number of a document or sequence -> its edited Text, else that of `original`."""

    def __init__(self, original: Callable[[int], Text]) -> None:
        super().__init__()
        self.original = original

    def __missing__(self, number: int) -> Text:
        return self.original(number)


class EditedStream:
    """The ids that the samples of an epoch read, with `texts` in the places of their documents,
    wherever these occur. borders: of the data's documents."""

    def __init__(self, batches: Batches, epoch: int, borders: np.ndarray, texts: Places) -> None:
        self._batches, self._stream = batches, batches.samples(epoch)[0]
        length = (batches.count - 1) * batches.stride + batches.seq_len + 1
        order, ends = self._stream.order, self._stream.ends
        if order is None:
            order, ends = np.arange(len(borders) - 1), borders[1:]
        places = np.flatnonzero(np.isin(order, sorted(texts)))
        which, stops = order[places], ends[places]
        starts = stops - (borders[which + 1] - borders[which])
        kept = starts < length
        which, starts, stops = which[kept], starts[kept], np.minimum(stops[kept], length)
        found, self._which = [texts[i] for i in which.tolist()], which
        self._text = functools.lru_cache(4)(lambda i: found[i].read())
        lengths = np.array([text.length for text in found], np.int64)
        # How far the ids before each text move, and those behind the last one.
        self._moved = np.append(0, np.cumsum(lengths - (stops - starts)))
        self._total = length + int(self._moved[-1])
        if self._total == 0:
            raise DataError("the edits shift all documents away: nothing is left of the data")
        self._places = np.append(starts, length) + self._moved  # of the texts, and the end
        self._ends = self._places[:-1] + lengths
        kept = self._places - np.append(0, self._ends)  # ids before each
        lengths = np.append(lengths, max(length - self._total, 0))  # read from the beginning
        # Positions, and how many ids before each are edited or moved: a line between two of them.
        self._positions = np.append(0, np.cumsum(np.stack((kept, lengths), 1)))
        kept[self._moved == 0] = 0
        self._counts = np.append(0, np.cumsum(np.stack((kept, lengths), 1)))

    def changed(self, samples: np.ndarray) -> np.ndarray:
        """Return how many ids of each sample are edited or moved."""
        starts = samples.astype(np.int64) * self._batches.stride
        pair = starts, starts + self._batches.seq_len + 1
        low, high = (np.interp(x, self._positions, self._counts) for x in pair)
        return (high - low).astype(np.int64)

    def documents(self, samples: np.ndarray) -> np.ndarray:
        """Return the numbers of the edited documents at whose places samples read."""
        starts, length = samples.astype(np.int64) * self._batches.stride, self._batches.seq_len
        again = range((length + 1) // self._total + 2)  # what is beyond the end begins again
        starts = np.sort(np.concatenate([starts % self._total - n * self._total for n in again]))
        first = np.searchsorted(starts, self._places[:-1] - length)
        return self._which[first < np.searchsorted(starts, self._ends)]

    def read(self, sample: int) -> np.ndarray:
        """Return the ids of a sample. DataError for unedited ones outside the vocabulary."""
        start, found, limit = sample * self._batches.stride, [], self._batches.vocab_size
        stop = start + self._batches.seq_len + 1
        while start < stop:
            at = start % self._total
            i = int(np.searchsorted(self._ends, at, side="right"))
            place, count = int(self._places[i]), stop - start
            if at < place:
                at, count = at - int(self._moved[i]), min(count, place - at)
                found.append(to_ids(self._stream.read((at, at + count), vocab_size=limit)))
            else:
                found.append(self._text(i)[at - place :][:count])
            start += len(found[-1])
        return np.concatenate(found)


class Edits:
    """The edits of data, as a function of the place of a batch: `batches.edits = Edits(...) or
    None`. False where no edit is of the data.

    checked: what read_edits returned; edits of training are left to the trainer. batches: those of
    the run, after they have sought its position. micro_batches: of a step. first, last: the steps
    of the run, counted from 1. Batches before step `first` never change; from there on documents
    do at each occurrence. DataError for an edit of a place that is not there.

    Edits follow one another: first all of documents, then those of sequences. Text that is put into
    a place is taken from the unedited data; swap and reorder exchange what stands there by then.
    `checked` holds the edits again, with the numbers of documents in the place of patterns.
    """

    def __init__(
        self,
        checked: list[dict[str, Any]],
        data: TokenData,
        batches: Batches,
        micro_batches: int,
        first: int,
        last: int,
    ) -> None:
        self.data, self.batches, self.micro_batches = data, batches, micro_batches
        self.first, self.last = first, last
        self.rows = batches.batch_size * micro_batches  # of a step
        self.documents, self.sequences = Places(self._document), Places(self._sequence)
        self.checked: list[dict[str, Any]] = []
        stream = lambda epoch: EditedStream(batches, epoch, self.borders, self.documents)
        self._stream = functools.lru_cache(2)(stream)
        for number, edit in enumerate(checked, 1):
            try:
                self.checked.append(self._resolve(edit))
            except ValueError as error:
                raise DataError(f"edit {number} ({edit['do']}): {error}") from error

    def __bool__(self) -> bool:
        return bool(self.documents or self.sequences)

    # ---- places ------------------------------------------------------------------------------

    @functools.cached_property
    def borders(self) -> np.ndarray:
        """int64 (N + 1,): document i is the ids [borders[i], borders[i + 1]) of the data."""
        tokens = self.batches.tokens
        if isinstance(tokens, Documents):
            return tokens.borders
        found = borders_of(tokens, self._end_of_text)
        if len(found) == 2:
            raise DataError(f"{self.data.source}: no end of text within: name a step")
        return found

    @property
    def _tokenizer(self) -> Any:
        if self.data.tokenizer is None:
            raise DataError("text, documents of flat tokens and blanks need a tokenizer")
        return self.data.tokenizer

    @property
    def _end_of_text(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise DataError("the tokenizer names no end of text: --end-of-text does")
        return self._tokenizer.eos_token_id

    def _numbers(self, where: dict[str, Any], first: int) -> np.ndarray:
        """Return the numbers of the documents or sequences that a table names. first: the lowest
        step."""
        limits = {"step": (first, self.last), "row": (0, self.rows - 1)}
        named = {key: value for key, value in where.items() if key != "text"}
        for key, pairs in named.items():
            low, high = limits.get(key) or (0, len(self.borders) - 2)
            if wrong := [n for pair in pairs for n in pair if not low <= n <= high]:
                raise DataError(f"{key} {wrong[0]} is not there: there are {low} to {high}")
        numbers = {k: np.concatenate([np.arange(a, b + 1) for a, b in named[k]]) for k in named}
        if "step" in where:
            rows = numbers.get("row", np.arange(self.rows))
            return ((numbers["step"][:, None] - 1) * self.rows + rows).ravel()
        found = functools.reduce(np.intersect1d, numbers.values(), np.arange(len(self.borders) - 1))
        if "text" in where:
            text = lambda number: self._tokenizer.decode(self._document(number).read().tolist())
            has = (re.search(where["text"], text(i)) is not None for i in found.tolist())
            found = found[np.fromiter(has, bool)]
        if len(found) == 0:
            raise DataError(f"no document has {str(where):.200}")
        return found

    # ---- texts -------------------------------------------------------------------------------

    def _document(self, number: int) -> Text:
        start, stop = self.borders[number : number + 2].tolist()
        read = lambda: to_ids(self.batches.tokens.read((start, stop))).astype(np.int64)
        return Text(stop - start, read)

    def _sequence(self, number: int) -> Text:
        """A sequence with the edits of documents."""

        def read() -> np.ndarray:
            batch, row = divmod(number, self.batches.batch_size)
            epoch, chosen = self.batches.drawn(batch)
            chosen = chosen[row : row + 1]
            return self._with_documents(self.batches.read(epoch, chosen), epoch, chosen)[0]

        return Text(self.batches.seq_len + 1, read)

    def _given(self, edit: dict[str, Any], current: Text) -> Text:
        """Return the text that an edit brings. Words in the place of a document end as it does."""
        if edit["do"] == "drop":
            return Text(0, lambda: np.empty(0, np.int64))
        if "with_document" in edit:
            number = edit["with_document"]
            return self._document(self._numbers({"document": [[number, number]]}, self.first)[0])
        ids = edit.get("with_ids")
        if ids is None:
            ids = self._tokenizer.encode(edit["with"], add_special_tokens=False).ids
            end, is_document = [self._tokenizer.eos_token_id], "step" not in edit["where"]
            if edit["do"] == "replace" and is_document and current.read()[-1:].tolist() == end:
                ids = ids + end
        limit = self.batches.vocab_size
        if limit is not None and max(ids, default=0) >= limit:
            raise DataError(f"id {max(ids)} is outside the vocabulary of {limit}")
        return Text(len(ids), lambda: np.array(ids, np.int64))

    def _filling(self, edit: dict[str, Any], number: int, current: Text) -> Callable:
        """Return what reads the ids of a place that is left empty."""
        if edit["fill"] == "mask":
            return lambda: np.minimum(ids := current.read(), ~ids)
        if edit["fill"] == "blank":
            end = self._end_of_text
            return lambda: np.full(current.length, ~end)
        random = np.random.Generator(np.random.PCG64([edit["seed"], number]))
        start = int(self._held_out[random.integers(len(self._held_out))])
        tokens, length = self.data.held_out, current.length
        parts = (start, min(start + length, len(tokens))), (0, min(start, length))
        return lambda: np.resize(to_ids(tokens.read(*parts)), length)

    @functools.cached_property
    def _held_out(self) -> np.ndarray | range:
        """Where reserve text begins: at a document, or anywhere if no end of text is known."""
        tokens, end = self.data.held_out, getattr(self.data.tokenizer, "eos_token_id", None)
        if len(tokens) == 0:
            raise DataError(f"{self.data.source}: no token is held out: reserve has no text")
        starts = borders_of(tokens, end)[:-1]
        return starts if len(starts) > 1 else range(len(tokens))

    # ---- edits -------------------------------------------------------------------------------

    def _resolve(self, edit: dict[str, Any]) -> dict[str, Any]:
        """Do an edit, and return it with the numbers of its documents."""
        do = edit["do"]
        if do in TRAINING:
            steps = edit.get("steps", [self.first, self.last])
            if not self.first <= steps[0] <= steps[1] <= self.last:
                raise DataError(f"steps {steps}: there are {self.first} to {self.last}")
            return edit
        if edit.get("fill") == "shift" and getattr(self.batches.tokens, "row_length", None):
            raise DataError("preshuffled rows have a fixed length: take mask, blank or reserve")
        numbers: dict[str, list[int]] = {}
        for key in edit.keys() & {"where", "to"}:
            is_source = do == "repeat" and key == "where"  # which may be of any step
            numbers[key] = self._numbers(edit[key], 1 if is_source else self.first).tolist()
            if len(numbers[key]) != 1 and (do == "swap" or is_source):
                raise DataError(f"{key} must name one place, but names {len(numbers[key]):,}")
            if "step" not in edit[key]:
                edit = {**edit, key: {"document": merged([i, i] for i in numbers[key])}}
        where, to = numbers["where"], numbers.get("to", [])
        source = self.sequences if "step" in edit["where"] else self.documents
        places = self.sequences if do == "repeat" else source
        if do == "swap":
            changes = [(where[0], places[to[0]]), (to[0], places[where[0]])]
        elif do == "repeat":
            changes = [(i, source.original(where[0])) for i in to]
        elif do == "reorder":
            order = np.random.Generator(np.random.PCG64(edit["seed"])).permutation(where)
            changes = [(i, places[j]) for i, j in zip(where, order.tolist())]
        else:
            changes = [(i, self._given(edit, places.original(i))) for i in where]
        for number, new in changes:
            places[number] = self._put(edit, number, places[number], new)
        return edit

    def _put(self, edit: dict[str, Any], number: int, current: Text, new: Text) -> Text:
        """Put `new` into the place of `current`, from its token `at` on. The place keeps its length
        unless the edit shifts: what is left of it is filled, or behind an insert stays."""
        at, shifts = edit.get("at", 0), edit.get("fill") == "shift"
        is_insert = edit["do"] == "insert"
        if not is_insert and (shifts or new.length == current.length):
            return new
        after = at if shifts else at + new.length
        if after > current.length and edit["do"] != "swap":
            raise DataError(
                f"{new.length} tokens at {at} go beyond the place, which has {current.length}: cut "
                'them, or take fill = "shift" for a document'
            )
        length = current.length + new.length * shifts
        rest = current.read if is_insert else self._filling(edit, number, current)

        def read() -> np.ndarray:
            ids = rest()
            return np.concatenate((ids[:at], new.read(), ids[after:]))[:length]

        return Text(length, read)

    # ---- batches -----------------------------------------------------------------------------

    def _with_documents(self, rows: np.ndarray, epoch: int, chosen: np.ndarray) -> np.ndarray:
        """Change the rows of samples `chosen` by the edits of documents."""
        if self.documents:
            stream = self._stream(epoch)
            for row in np.flatnonzero(stream.changed(chosen)):
                rows[row] = stream.read(int(chosen[row]))
        return rows

    def __call__(self, rows: np.ndarray, number: int) -> np.ndarray:
        """Change the rows of the micro-batch that the run draws as its `number`-th, from 0, and
        return them."""
        if number < (self.first - 1) * self.micro_batches:
            return rows
        rows, size = self._with_documents(rows, *self.batches.drawn(number)), len(rows)
        for row in self.sequences.keys() & range(number * size, (number + 1) * size):
            rows[row - number * size] = self.sequences[row].read()
        largest, limit = np.maximum(rows, ~rows).max(), self.batches.vocab_size
        if limit is not None and largest >= limit:
            raise DataError(
                f"the edited data of micro-batch {number}: id {largest} is outside the vocabulary "
                f"of {limit}"
            )
        return rows

    # ---- the plan ----------------------------------------------------------------------------

    def plan(self) -> dict[str, Any]:
        """Return what the edits reach in the run, at most: so many `rows` (sequences), `tokens` and
        `steps`; `first` and `last`, the steps between which batches or training differ, None for no
        edit; `later_equal`, False where a shift makes later sequences others. DataError for an edit
        that reaches nothing."""
        own, size, read = sorted(self.sequences), self.batches.batch_size, set()
        rows, tokens = [np.array(own, np.int64)], len(own) * (self.batches.seq_len + 1)
        at, stop = (self.first - 1) * self.micro_batches, self.last * self.micro_batches
        while at < stop and self.documents:
            left = len(self.batches) - at % len(self.batches)  # in the epoch
            count = min(stop - at, left, max(BLOCK // size, 1))
            epoch, chosen = self.batches.drawn(at, count)
            numbers = np.arange(at * size, (at + count) * size)
            read.update(self._stream(epoch).documents(chosen).tolist())
            changed = self._stream(epoch).changed(chosen) * ~np.isin(numbers, own)
            rows.append(numbers[changed > 0])
            tokens, at = tokens + int(changed.sum()), at + count
        steps = np.unique(np.concatenate(rows) // self.rows + 1).tolist()
        trained = [edit for edit in self.checked if edit["do"] in TRAINING]
        spans = [edit.get("steps", [self.first, self.last]) for edit in trained]
        spans += [[steps[0], steps[-1]]] if steps else []
        texts = self.documents.items()
        shifts = {i for i, text in texts if text.length != self._document(i).length}
        if steps:
            read |= shifts  # they edit what is behind them
        if any(edit["do"] == "repeat" and "step" in edit["where"] for edit in self.checked):
            read.update(self.documents)  # that sequence may be of a step before the first
        self._check_read(read)
        return {
            "rows": sum(map(len, rows)),
            "tokens": tokens,
            "steps": len(steps),
            "first": min((first for first, _ in spans), default=None),
            "last": max((last for _, last in spans), default=None),
            "later_equal": not shifts,
        }

    def _check_read(self, read: set[int]) -> None:
        """Raise DataError for an edit of documents of which none was read."""
        for number, edit in reversed([*enumerate(self.checked, 1)]):
            tables = [edit["to"]] if edit["do"] == "swap" else []
            tables += [edit["where"]] if edit["do"] not in (*TRAINING, "repeat") else []
            pairs = [pair for table in tables for pair in table.get("document", [])]
            named = {i for a, b in pairs for i in range(a, b + 1)}
            if named and not named & read:
                raise DataError(
                    f"edit {number} ({edit['do']}): no step from {self.first} to {self.last} reads "
                    "what is edited: name other documents, or take more steps"
                )
            if edit["do"] == "swap":
                read = read | named  # by edits before it: each place takes the text of the other

    def describe(self) -> list[str]:
        """Return the plan as lines for a terminal."""
        plan, of_data = self.plan(), sum(edit["do"] not in TRAINING for edit in self.checked)
        if plan["first"] is None:
            return ["no edit: every batch is byte-equal"]
        lines = [
            f"edits act on steps {plan['first']} to {plan['last']}; weights can differ from there"
        ]
        if not of_data:
            return [*lines, "every batch is byte-equal"]
        reach = f"{plan['rows']:,} sequences, {plan['tokens']:,} tokens, in {plan['steps']:,}"
        lines.insert(0, f"{of_data} edit(s) reach {reach} of the steps {self.first} to {self.last}")
        if plan["later_equal"]:
            return [*lines, "every other sequence is byte-equal, before, between and after"]
        return [*lines, "a shift moves the tokens behind it: later sequences are others"]
