"""Edits: the sequences of a run whose data are edited (needle/data/edits.py reads the edits).

    an edit -> the new text of each place      Edits.documents, Edits.sequences
    epoch   -> the stream of its samples, in which edited documents are stretches of other text
    a batch -> its rows, those that an edit reaches read anew

The stream of an epoch is the ids that its samples cover, in the order in which they are cut: sample
i is T + 1 ids from i T on. A stretch that becomes longer or shorter (fill = "shift") moves the ids
behind it. The stream keeps its length: what is too much at its end is not read, what is missing is
read from its beginning, as np.resize has it. So samples, epochs and positions stay those of the
data. An id whose loss is 0 as a target is stored as its complement, ~id.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from needle.data.batches import Batches, Packed, Rows, Windows
from needle.data.edits import TRAINING, merged
from needle.data.readers import TokenData
from needle.data.tokens import DataError, Documents, FlatTokens, check_ids, place_of, to_ids

BLOCK = 1 << 22  # ids, or sequences, that are looked at together


class Text(NamedTuple):
    """Ids for a place, read when a batch needs them."""

    length: int
    read: Callable[[], np.ndarray]

    def hidden(self) -> Text:
        """The same ids, with a loss of 0."""
        return Text(self.length, lambda: np.minimum(ids := self.read(), ~ids))

    def cut(self, start: int, stop: int) -> Text:
        return Text(stop - start, lambda: self.read()[start:stop])


def joined(*texts: Text) -> Text:
    length = sum(text.length for text in texts)
    return Text(length, lambda: np.concatenate([text.read() for text in texts]))


def constant(ids: Iterable[int]) -> Text:
    held = np.fromiter(ids, np.int64)
    return Text(len(held), lambda: held)


class Places(dict):
    """Number of a document or sequence -> its Text, for those that are edited; others give that of
    `original`."""

    def __init__(self, name: str, original: Callable[[int], Text]) -> None:
        super().__init__()
        self.name, self.original = name, original

    def __missing__(self, number: int) -> Text:
        return self.original(number)


class Stream:
    """The stream of an epoch, `length` ids: in the place of [starts, stops), sorted, stand the
    texts of documents `which`."""

    def __init__(
        self, length: int, starts: np.ndarray, stops: np.ndarray, which: np.ndarray, texts: Places
    ) -> None:
        self.length, self.starts, self.stops, self.which = length, starts, stops, which
        self._text = functools.lru_cache(4)(lambda i: texts[i].read())
        lengths = np.array([texts[i].length for i in which.tolist()], np.int64)
        # Before stretch i the edited stream is this much longer.
        self.added = np.concatenate([[0], np.cumsum(lengths - (stops - starts))])
        self.begins = starts + self.added[:-1]
        self.ends = self.begins + lengths
        self.total = length + int(self.added[-1])
        if self.total <= 0:
            raise DataError("nothing is left of the data")
        until = np.where(self.added[1:] == 0, self.ends, np.append(self.begins[1:], length))
        self._from = np.concatenate([[0], self.begins])
        self._widths = np.concatenate([[0], until - self.begins])
        self._before = np.cumsum(self._widths) - self._widths

    def changed(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """How many ids of each [start, stop) of the edited stream are edited or moved."""

        def before(position: np.ndarray) -> np.ndarray:
            i = np.searchsorted(self._from, position, side="right") - 1
            return self._before[i] + np.minimum(position - self._from[i], self._widths[i])

        return before(stops) - before(starts)

    def documents_in(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The edited documents of which an id lies in a [start, stop) before the edits."""
        marks = np.zeros(len(self.which) + 1, np.int64)
        first = np.searchsorted(self.stops, starts, side="right")
        after = np.searchsorted(self.starts, stops, side="left")
        np.add.at(marks, first[first < after], 1)
        np.add.at(marks, after[first < after], -1)
        return self.which[np.cumsum(marks)[:-1] > 0]

    def read(self, start: int, stop: int, unedited: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """The ids [start, stop) of the edited stream; unedited(start, stop) reads the data's."""
        found = []
        while start < stop:
            offset = start % self.total
            end = min(offset + stop - start, self.total)
            start += end - offset
            found += self._read(offset, end, unedited)
        return np.concatenate(found)

    def _read(self, start: int, stop: int, unedited: Callable) -> Iterator[np.ndarray]:
        i = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            added, is_last = int(self.added[i]), i == len(self.begins)
            begin = stop if is_last else min(int(self.begins[i]), stop)
            if start < begin:
                yield unedited(start - added, begin - added)
                start = begin
            if start < stop:
                own = self._text(int(self.which[i]))[start - int(self.begins[i]) :][: stop - start]
                yield own
                start, i = start + len(own), i + 1


class Edits:
    """The edits of data, as a function of the place of a batch: `batches.edits = Edits(...)`.

    checked: the list of read_edits, whose edits of training are left to the trainer. batches: the
    run's, which have sought its position; micro_batches: of a step. first, last: the steps of the
    run, from 1. Batches before step `first` are never changed; documents are, from there on, at
    each occurrence. DataError for an edit whose place is not there.

    Edits hold one after the other: first all of documents, then those of sequences. Text that is
    put into a place is that of the unedited data; swap and reorder exchange what stands there.
    `checked` holds the edits again, with the numbers of documents in the place of a pattern.

    >>> from needle.data import Batches, FlatTokens, TokenData
    >>> batches = Batches(np.arange(100, 117), batch_size=2, seq_len=4, seed=1)
    >>> data = TokenData(batches.tokens, batches.tokens, "")
    >>> edit = {"do": "drop", "where": {"step": [[2, 2]], "row": [[0, 0]]}, "fill": "mask"}
    >>> batches.edits = ndl.data.edited.Edits([edit], data, batches, 1, first=1, last=2)
    >>> _ = batches.next()
    >>> batches.next()[1]
    array([[-110, -111, -112, -113],
           [ 113,  114,  115,  116]])
    """

    def __init__(
        self,
        checked: list[dict[str, Any]],
        data: TokenData,
        batches: Batches,
        micro_batches: int,
        first: int,
        last: int,
        tokenizer: Any = None,
    ) -> None:
        self.data, self.batches, self.micro_batches = data, batches, micro_batches
        self.first, self.last = first, last
        self.tokenizer = tokenizer or data.tokenizer
        self.rows = batches.batch_size * micro_batches  # a step
        self.documents = Places("document", self._document)
        self.sequences = Places("sequence", self._sequence)
        self.notes: list[str] = []
        self.checked = []
        self._other_epoch = functools.lru_cache(2)(batches.drawn_in)
        self._stream = functools.lru_cache(2)(self._make_stream)
        self._held_out_starts = functools.lru_cache(1)(self._make_held_out_starts)
        for number, edit in enumerate(checked, 1):
            try:
                self.checked.append(self._resolve(edit, f"edit {number} ({edit['do']})"))
            except ValueError as error:
                raise DataError(f"edit {number} ({edit['do']}): {error}") from error

    # ---- places ------------------------------------------------------------------------------

    @functools.cached_property
    def borders(self) -> np.ndarray:
        """int64 (N + 1,): document i is the ids [borders[i], borders[i + 1]) of the data."""
        tokens = self.batches.tokens
        if isinstance(tokens, Documents):
            return np.concatenate([[0], np.cumsum(tokens.sizes, dtype=np.int64)])
        found = borders_of(tokens, self._end_of_text("documents of flat tokens are found by"))
        if len(found) == 2:
            raise DataError(
                f"{self.data.source}: no end of text within: these tokens have no documents; name "
                "a step and a row"
            )
        return found

    def _end_of_text(self, why: str) -> int:
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if end is None:
            raise DataError(
                f"{why} the end of text, and no tokenizer says which id that is: give --tokenizer"
            )
        return end

    def _places(self, where: dict[str, Any]) -> tuple[Places, np.ndarray]:
        """The places that a table names, by their numbers."""
        if "step" in where:
            low, high = where["step"][0][0], where["step"][-1][1]
            if not self.first <= low <= high <= self.last:
                outside = low if low < self.first else high
                raise DataError(
                    f"step {outside} is none of this run, whose steps are {self.first} to "
                    f"{self.last}"
                )
            rows = where.get("row", [[0, self.rows - 1]])
            if rows[-1][1] >= self.rows:
                raise DataError(
                    f"row {rows[-1][1]} is not there: a step has {self.rows} sequences, from 0 on"
                )
            steps = np.concatenate([np.arange(a, b + 1) for a, b in where["step"]])
            own = np.concatenate([np.arange(a, b + 1) for a, b in rows])
            return self.sequences, ((steps[:, None] - 1) * self.rows + own).ravel()
        count, found = len(self.borders) - 1, None
        for key in [key for key in where if key != "text"]:
            if where[key][-1][1] >= count:
                raise DataError(
                    f"document {where[key][-1][1]} is not there: the data have {count:,} "
                    "documents, from 0 on"
                )
            numbers = np.concatenate([np.arange(a, b + 1) for a, b in where[key]])
            found = numbers if found is None else np.intersect1d(found, numbers)
        found = np.arange(count) if found is None else found
        if "text" in where:
            if self.tokenizer is None:
                raise DataError("text is found by a tokenizer: give --tokenizer")
            search = re.compile(where["text"]).search
            text_of = lambda i: self.tokenizer.decode(self._document(i).read().tolist())
            found = np.array([i for i in found.tolist() if search(text_of(i))], np.int64)
        if len(found) == 0:
            wanted = ", ".join(f"{key} = {value!r:.60}" for key, value in where.items())
            raise DataError(f"no document of the data has {wanted}")
        return self.documents, found

    def _one(self, edit: dict[str, Any], key: str) -> int:
        """The number of the one place that a table names."""
        numbers = self._places(edit[key])[1]
        if len(numbers) != 1:
            raise DataError(f"{key} names {len(numbers):,} places, and must name one")
        return int(numbers[0])

    # ---- texts -------------------------------------------------------------------------------

    def _document(self, number: int) -> Text:
        start, stop = self.borders[number : number + 2].tolist()
        return self._of(self.batches.tokens, (start, stop))

    def _of(self, tokens: FlatTokens, *stretches: tuple[int, int]) -> Text:
        """The ids of stretches, checked when they are read."""

        def read() -> np.ndarray:
            ids = to_ids(tokens.read(*stretches))
            if self.batches.vocab_size is not None:
                places = lambda i: [p for one in stretches for p in range(*one)][i]
                check_ids(ids, self.batches.vocab_size, lambda i: place_of(tokens, places(i)))
            return ids.astype(np.int64)

        return Text(sum(stop - start for start, stop in stretches), read)

    def _sequence(self, number: int) -> Text:
        """A sequence with the edits of documents."""

        def read() -> np.ndarray:
            batch, row = divmod(number, self.batches.batch_size)
            epoch, batch = divmod(batch, len(self.batches))
            chosen = self._drawn_in(epoch)[1][batch * self.batches.batch_size + row :][:1]
            rows = self.batches.read(self._drawn_in(epoch)[0], chosen)
            return self._with_documents(rows, epoch, chosen)[0].astype(np.int64)

        return Text(self.batches.seq_len + 1, read)

    def _given(self, edit: dict[str, Any], ends: bool) -> Text:
        """The text that an edit brings; ends: text in words ends with the end of text."""
        if "with_document" in edit:
            return self._document(self._places({"document": [[edit["with_document"]] * 2]})[1][0])
        ids = edit.get("with_ids")
        if ids is None:
            if self.tokenizer is None:
                raise DataError("with: a text needs a tokenizer: give --tokenizer, or with_ids")
            ids = self.tokenizer.encode(edit["with"], add_special_tokens=False).ids
            ids = [*ids, *([self._end_of_text("a document ends with")] if ends else [])]
        limit = self.batches.vocab_size
        if limit is not None and max(ids, default=0) >= limit:
            raise DataError(f"id {max(ids)} is outside the vocabulary of {limit}")
        return constant(ids)

    def _filling(self, edit: dict[str, Any], number: int, current: Text) -> Text:
        """What stands where text is left out."""
        if edit["fill"] == "mask":
            return current.hidden()
        if edit["fill"] == "blank":
            end = self._end_of_text("blank text is")
            return Text(current.length, lambda: np.full(current.length, ~end, np.int64))
        tokens, starts = self.data.held_out, self._held_out_starts()
        random = np.random.Generator(np.random.PCG64([edit["seed"], number]))
        start, left = int(starts[random.integers(len(starts))]), current.length
        stretches = []
        while left > 0:
            stretches.append((start, min(start + left, len(tokens))))
            start, left = 0, left - (stretches[-1][1] - start)
        return self._of(tokens, *stretches)

    def _make_held_out_starts(self) -> np.ndarray | range:
        """Where text in the held-out tokens begins: at a document, if it is known where they end,
        else anywhere."""
        tokens = self.data.held_out
        if len(tokens) == 0:
            raise DataError(f"{self.data.source}: nothing is held out: reserve has no text to take")
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        starts = [0] if end is None else borders_of(tokens, end)[:-1]
        return starts if len(starts) > 1 else range(len(tokens))

    # ---- edits -------------------------------------------------------------------------------

    def _resolve(self, edit: dict[str, Any], name: str) -> dict[str, Any]:
        """Do an edit; return it with the numbers of its documents."""
        do = edit["do"]
        if do in TRAINING:
            steps = edit.get("steps", [self.first, self.last])
            if not self.first <= steps[0] <= steps[1] <= self.last:
                raise DataError(f"steps {steps}: those of this run are {self.first} to {self.last}")
            return edit
        if edit.get("fill") == "shift" and isinstance(self.batches.drawn_in(0)[0], Rows):
            raise DataError("preshuffled rows have a fixed length, in which nothing shifts")
        for key in ("where", "to"):
            if "step" not in edit.get(key, ["step"]):
                numbers = self._places(edit[key])[1].tolist()
                edit = {**edit, key: {"document": merged([i, i] for i in numbers)}}
        places, found = self._places(edit["where"])
        numbers = found.tolist()
        if do == "reorder":
            order = np.random.Generator(np.random.PCG64(edit["seed"])).permutation(found)
            texts = [places[i] for i in order.tolist()]
            places.update(zip(numbers, texts))
        elif do == "swap":
            here, there = self._one(edit, "where"), self._one(edit, "to")
            one, other = places[here], places[there]
            places[here] = self._put(edit, here, one, other, cuts=True)
            places[there] = self._put(edit, there, other, one, cuts=True)
            if one.length != other.length and edit["fill"] != "shift":
                self.notes.append(
                    f"{name}: documents of {one.length} and {other.length} tokens: the longer is "
                    f"cut, and the rest of its own place filled ({edit['fill']})"
                )
        elif do == "repeat":
            source = places.original(self._one(edit, "where"))
            for i in self._places(edit["to"])[1].tolist():
                self.sequences[i] = self._put(edit, i, self.sequences[i], source)
        else:
            for i in numbers:
                ends = do == "replace" and places is self.documents and self._ends(i)
                new = constant([]) if do == "drop" else self._given(edit, ends)
                put = self._insert if do == "insert" else self._put
                places[i] = put(edit, i, places[i], new)
        return edit

    def _ends(self, number: int) -> bool:
        """True if a document ends with the end of text."""
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return end is not None and int(self._document(number).read()[-1]) == end

    def _put(
        self, edit: dict[str, Any], number: int, current: Text, new: Text, cuts: bool = False
    ) -> Text:
        """`new` in the place of `current`, of the same length unless the edit shifts."""
        if edit["fill"] == "shift":
            return new
        length = current.length
        if new.length > length and not cuts:
            raise DataError(
                f"{new.length} tokens are longer than the place, which has {length}: cut the text, "
                'or take fill = "shift" for a document'
            )
        if new.length >= length:
            return new.cut(0, length)
        return joined(new, self._filling(edit, number, current).cut(new.length, length))

    def _insert(self, edit: dict[str, Any], number: int, current: Text, new: Text) -> Text:
        shifts, at = edit.get("fill") == "shift", edit["at"]
        after = at if shifts else at + new.length
        if after > current.length:
            raise DataError(
                f"{new.length} tokens at {at} go beyond the place, which has {current.length}"
            )

        def read() -> np.ndarray:
            ids = current.read()
            return np.concatenate([ids[:at], new.read(), ids[after:]])

        return Text(current.length - (after - at) + new.length, read)

    # ---- batches -----------------------------------------------------------------------------

    def _drawn_in(self, epoch: int) -> tuple[Windows, np.ndarray]:
        """As Batches.drawn_in, which gives the samples of its own epoch for as long as it lasts."""
        own = epoch == self.batches.epoch
        return self.batches.drawn_in(epoch) if own else self._other_epoch(epoch)

    def _make_stream(self, epoch: int) -> Stream:
        samples, which = self._drawn_in(epoch)[0], np.array(sorted(self.documents), np.int64)
        starts, stops = self.borders[which], self.borders[which + 1]
        if isinstance(samples, Packed):
            places = np.flatnonzero(np.isin(samples.doc_idx, which))
            ends = np.cumsum(samples.tokens.sizes[samples.doc_idx], dtype=np.int64)
            which, stops = samples.doc_idx[places].astype(np.int64), ends[places]
            starts = stops - samples.tokens.sizes[which]
        length = (samples.count - 1) * samples.stride + self.batches.seq_len + 1
        kept = starts < length
        stops = np.minimum(stops, length)
        return Stream(length, starts[kept], stops[kept], which[kept], self.documents)

    def _with_documents(self, rows: np.ndarray, epoch: int, chosen: np.ndarray) -> np.ndarray:
        """The rows of samples `chosen`, with the edits of documents."""
        if not self.documents:
            return rows
        samples, stream = self._drawn_in(epoch)[0], self._stream(epoch)
        starts = chosen.astype(np.int64) * samples.stride
        stops = starts + rows.shape[1]
        for row in np.flatnonzero(stream.changed(starts, stops)).tolist():
            unedited = functools.partial(self._unedited, samples)
            rows[row] = stream.read(int(starts[row]), int(stops[row]), unedited)
        return rows

    def _unedited(self, samples: Windows, start: int, stop: int) -> np.ndarray:
        """The ids [start, stop) of a stream that nothing has changed."""
        stride, last = samples.stride, samples.count - 1
        first = min(start // stride, last)
        rows = self.batches.read(samples, np.arange(first, min((stop - 1) // stride, last) + 1))
        ids = np.append(rows[:, :stride], rows[-1, stride:])
        return ids[start - first * stride : stop - first * stride]

    def __call__(self, rows: np.ndarray, epoch: int, batch: int) -> np.ndarray:
        """The rows to draw in the place of these, which are micro-batch `batch` of an epoch."""
        size, number = self.batches.batch_size, epoch * len(self.batches) + batch
        if number < (self.first - 1) * self.micro_batches:
            return rows
        chosen = self._drawn_in(epoch)[1][batch * size : (batch + 1) * size]
        rows = self._with_documents(rows, epoch, chosen)
        for row in range(size):
            if number * size + row in self.sequences:
                rows[row] = self.sequences[number * size + row].read()
        return rows

    # ---- the plan ----------------------------------------------------------------------------

    def _drawn(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(epoch, numbers, starts in its stream) of all sequences of the run, some at a time."""
        size, stop = self.batches.batch_size, self.last * self.micro_batches
        at = (self.first - 1) * self.micro_batches
        while at < stop:
            epoch, batch = divmod(at, len(self.batches))
            count = min(stop - at, len(self.batches) - batch, max(BLOCK // size, 1))
            samples, order = self._drawn_in(epoch)
            chosen = order[batch * size : (batch + count) * size].astype(np.int64)
            yield epoch, at * size + np.arange(len(chosen)), chosen * samples.stride
            at += count

    def plan(self) -> dict[str, Any]:
        """What the edits reach in the run: how many `rows` (sequences), `tokens` and `steps`, at
        most; `first` and `last`, the steps between which batches or training can differ, None where
        nothing does; `unread`, how many edited documents no step reads; `later_equal`, False where
        a shift makes later sequences others. DataError where the edits reach nothing."""
        own, length = np.array(sorted(self.sequences), np.int64), self.batches.seq_len + 1
        rows, tokens, unread = [own], len(own) * length, set(self.documents)
        for epoch, numbers, starts in self._drawn() if self.documents else ():
            stream = self._stream(epoch)
            changed = stream.changed(starts, starts + length)
            changed[np.isin(numbers, own)] = 0
            rows.append(numbers[changed > 0])
            tokens += int(changed.sum())
            unread -= set(stream.documents_in(starts, starts + length).tolist())
        found = np.concatenate(rows)
        steps = np.unique(found // self.rows + 1).tolist()
        both = [self.first, self.last]
        spans = [e.get("steps", both) for e in self.checked if e["do"] in TRAINING]
        spans += [[steps[0], steps[-1]]] if steps else []
        if self.checked and not spans:
            raise DataError(
                f"no step from {self.first} to {self.last} reads what the edits change: name "
                "other documents, or replay more steps"
            )
        return {
            "rows": len(found),
            "tokens": tokens,
            "steps": len(steps),
            "first": min((span[0] for span in spans), default=None),
            "last": max((span[1] for span in spans), default=None),
            "unread": len(unread),
            "later_equal": all(
                text.length == self._document(i).length for i, text in self.documents.items()
            ),
        }

    def describe(self) -> list[str]:
        """Lines about the plan, for a terminal."""
        plan, said = (
            self.plan(),
            [f"{len(self.checked)} edit(s) of steps {self.first} to {self.last}"],
        )
        if plan["first"] is None:
            return ["no edit: every batch is byte-equal"]
        said += [
            f"{plan['rows']:,} sequences in {plan['steps']:,} steps, {plan['tokens']:,} tokens",
            f"the first step that can differ: {plan['first']}; the last one edited: {plan['last']}",
            "every other sequence, before and after, is byte-equal"
            if plan["later_equal"]
            else "a shift moves the tokens behind it: later sequences are others",
        ]
        if plan["unread"]:
            said.append(f"{plan['unread']:,} edited document(s) are read by no step of these")
        return said + self.notes


def borders_of(tokens: FlatTokens, end: int) -> np.ndarray:
    """int64: 0, and the place behind each id `end` and the last id: the borders of documents."""
    found = [np.zeros(1, np.int64)]
    for start in range(0, len(tokens), BLOCK):
        ids = tokens.read((start, min(start + BLOCK, len(tokens))))
        found.append(np.flatnonzero(ids == end) + start + 1)
    borders = np.concatenate(found)
    return borders if borders[-1] == len(tokens) else np.append(borders, len(tokens))
