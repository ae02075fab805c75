"""Edits of the data of a run: the file, and the batches, against a model of the token stream."""

import functools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from harness import ROOT, naming
from hypothesis import example, given, settings
from hypothesis import strategies as st

from needle.data import (
    Batches,
    DataError,
    Documents,
    FlatTokens,
    Prefetch,
    TokenData,
    open_data,
    sample_order,
)
from needle.data.edited import Edits
from needle.data.edits import FORMS, check_edits, read_edits
from needle.data.tokens import Part
from needle.files import read_toml

END = 0  # of a text
B, T, MICRO, SEED = 2, 4, 2, 3
ROWS = B * MICRO  # of a step
FIRST, LAST = 3, 12
SIZES = [5, 1, 9, 2, 7, 13, 3, 9, 4, 11, 8, 20, 4, 1]
KINDS = ["windows", "packed", "rows"]


class Letters:
    """A tokenizer of letters, a to z."""

    eos_token_id = END

    def decode(self, ids):
        return "".join(chr(96 + i) for i in ids if i != END)

    def encode(self, text, add_special_tokens):
        return type("Encoding", (), {"ids": [ord(c) - 96 for c in text]})


def documents_of(sizes, seed):
    random = np.random.default_rng(seed)
    return [[*random.integers(1, 27, size - 1).tolist(), END] for size in sizes]


HELD_OUT = sum(documents_of([6, 3, 8], 9), [])


@functools.cache
def data_of(kind, sizes=tuple(SIZES)):
    """(TokenData, its documents)"""
    sizes = [T + 1] * len(sizes) if kind == "rows" else sizes
    documents = documents_of(sizes, 0)
    part = lambda ids: Part(None, 0, np.array(ids, np.uint16))
    tokens = FlatTokens([part(sum(documents, []))])
    if kind != "windows":
        length = T + 1 if kind == "rows" else None
        tokens = Documents(tokens.parts, np.array(sizes, np.int32), length)
    return TokenData(tokens, FlatTokens([part(HELD_OUT)]), kind, Letters()), documents


def batches_of(data, edits=None, samples=60):
    batches = Batches(data.train, B, T, SEED, samples, vocab_size=27)
    if edits is not None:
        batches.edits = Edits(edits, data, batches, MICRO, FIRST, LAST)
    return batches


def rows_of(batches, steps=LAST):
    """(steps * ROWS, T + 1)"""
    return np.concatenate([batches.next_rows() for _ in range(steps * MICRO)])


def model(kind, documents, edits, batches):
    """rows_of, by lists of ids: all texts of an epoch one after the other, then cut."""
    texts, passes = [list(text) for text in documents], batches.position.get("passes", 1)
    edited = set()

    def filled(edit, number, now, new):
        if edit["fill"] == "shift":
            return new
        rest = [min(i, ~i) for i in now]
        if edit["fill"] == "blank":
            rest = [~END for _ in now]
        if edit["fill"] == "reserve":
            begins = [0, *(i + 1 for i, x in enumerate(HELD_OUT[:-1]) if x == END)]
            random = np.random.Generator(np.random.PCG64([edit["seed"], number]))
            begin = begins[random.integers(len(begins))]
            rest = [HELD_OUT[(begin + i) % len(HELD_OUT)] for i in range(len(now))]
        return (new + rest[len(new) :])[: len(now)]

    def change(edit, table, numbers):
        for i in numbers(edit["where"]):
            now, new = table[i], edit.get("with_ids", [])
            if "with_document" in edit:
                new = documents[edit["with_document"]]
            if edit["do"] == "insert":
                after = edit["at"] + (len(new) if "fill" not in edit else 0)
                table[i] = now[: edit["at"]] + new + now[after:]
            elif edit["do"] == "swap":
                (j,) = numbers(edit["to"])
                table[i], table[j] = (
                    filled(edit, i, now, table[j]), filled(edit, j, table[j], now)
                )  # fmt: skip
            else:
                table[i] = filled(edit, i, now, new)

    def numbers_of_rows(where):
        steps = [s for a, b in where["step"] for s in range(a, b + 1)]
        rows = [r for a, b in where.get("row", [[0, ROWS - 1]]) for r in range(a, b + 1)]
        return [(s - 1) * ROWS + r for s in steps for r in rows]

    numbers = lambda where: [i for a, b in where["document"] for i in range(a, b + 1)]
    for edit in edits:
        if "document" in edit["where"] and edit["do"] != "repeat":
            change(edit, texts, numbers)
            edited.update(numbers(edit["where"]), numbers(edit.get("to", {"document": []})))

    def drawn(source):
        """The rows of all steps."""
        found, epoch, sizes = [], 0, [len(text) for text in documents]
        whole = edited if source is texts else ()
        while len(found) < LAST * ROWS:
            order, places = np.arange(sum(sizes) // (T + 1)), range(len(source))
            length, stride = sum(sizes), T + 1
            if kind != "rows":
                stride = T
                count = (sum(sizes) * passes - 1) // T
                order = np.random.Generator(np.random.PCG64([SEED, epoch])).permutation(count)
                length = count * T + 1
            if kind == "packed":
                arguments = np.array(sizes, np.int32), 0, len(sizes), T, SEED + epoch, passes
                places, _, order = sample_order(*arguments)
            stream, at = [], 0
            for i in places:
                inside = max(length - at, 0)
                stream += (source[i] if i in whole else source[i][:inside]) * (inside > 0)
                at += sizes[i]
            stream = np.resize(stream, length)
            drawn = [stream[s * stride :][: T + 1].tolist() for s in order.tolist()]
            found += drawn[: len(drawn) // B * B]
            epoch += 1
        return found[: LAST * ROWS]

    rows = drawn(documents)[: (FIRST - 1) * ROWS] + drawn(texts)[(FIRST - 1) * ROWS :]
    before = drawn(texts)
    for edit in edits:
        if edit["do"] == "reorder":
            chosen = numbers_of_rows(edit["where"])
            order = np.random.Generator(np.random.PCG64(edit["seed"])).permutation(chosen)
            for i, text in zip(chosen, [rows[j] for j in order]):
                rows[i] = text
        elif edit["do"] == "repeat":
            (source,) = (numbers if "document" in edit["where"] else numbers_of_rows)(edit["where"])
            text = documents[source] if "document" in edit["where"] else before[source]
            for i in numbers_of_rows(edit["to"]):
                rows[i] = filled(edit, i, rows[i], text)
        elif "step" in edit["where"]:
            change(edit, rows, numbers_of_rows)
    return np.array(rows)


# ---- batches -------------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """(kind, sizes, edits in their checked form, samples of the run)"""
    kind, edits = draw(st.sampled_from(KINDS)), []
    sizes = draw(st.lists(st.integers(1, 12), min_size=12, max_size=20))
    texts = [T + 1] * len(sizes) if kind == "rows" else sizes
    lengths = [*texts]  # of the edited documents
    number = st.integers(0, len(sizes) - 1)
    place = st.builds(
        lambda step, row: {"step": [[step, step]], "row": [[row, row]]},
        st.integers(FIRST, LAST),
        st.integers(0, ROWS - 1),
    )
    for _ in range(draw(st.integers(1, 5))):
        do = draw(st.sampled_from(["drop", "replace", "insert", "swap", "repeat", "reorder"]))
        is_document, i, j = draw(st.booleans()), draw(number), draw(number)
        length = min(lengths) if is_document else T + 1
        where = {"document": [[i, i]]} if is_document else draw(place)
        edit = {"do": do, "where": where}
        if do in ("replace", "insert"):
            at = draw(st.integers(0, length)) if do == "insert" else 0
            edit["with_ids"] = draw(st.lists(st.integers(1, 26), max_size=length - at)) or [7]
            if at + len(edit["with_ids"]) > length:
                continue
            if texts[j] <= length - at and draw(st.booleans()):
                del edit["with_ids"]
                edit["with_document"] = j
        if do == "insert":
            edit["at"] = at
        if do == "swap":
            edit["to"] = {"document": [[j, j]]} if is_document else draw(place)
        if do == "repeat":
            edit["to"] = draw(place)
            if not is_document:
                edit["where"] = {"step": [[1, 1]], "row": [[j % ROWS, j % ROWS]]}
            if is_document and texts[i] > T + 1:  # of the documents before the edits
                continue
        if do == "reorder":
            edit |= {"where": {"step": [[FIRST, LAST - 2]]}, "seed": j}
        shifts = is_document and kind != "rows" and do != "repeat"
        fill = draw(st.sampled_from(["mask", "blank", "reserve"] + ["shift"] * shifts))
        if do not in ("reorder", "insert") or do == "insert" and fill == "shift":
            edit |= {"fill": fill} | ({"seed": j} if fill == "reserve" else {})
        edits.append(edit)
        if fill == "shift" and do == "swap":
            lengths[i], lengths[j] = lengths[j], lengths[i]
        elif fill == "shift":
            new = texts[j] if "with_document" in edit else len(edit.get("with_ids", []))
            lengths[i] = lengths[i] + new if do == "insert" else new
    return kind, tuple(sizes), edits, draw(st.sampled_from([1, 60]))


def document(*numbers):
    return {"document": [[i, i] for i in numbers]}


def sequence(step, row):
    return {"step": [[step, step]], "row": [[row, row]]}


MASK, SHIFT = {"fill": "mask"}, {"fill": "shift"}
DROP = {"do": "drop", "where": document(4), **MASK}
ENDS = [
    DROP | {"where": document(0, 1, 13)},
    DROP | {"where": document(10), "fill": "blank"},
    DROP | {"where": document(5, 11), "fill": "reserve", "seed": 1},  # round all held-out tokens
]


# A repeat is of the data as they were.
REPEAT = [
    DROP | {"where": document(3)},
    {"do": "repeat", "where": document(3), "to": sequence(7, 3), **MASK},
]


# The last sample reads document 19 again, which stands at the beginning.
FEWER = [
    {"do": "replace", "where": document(19), "with_ids": [7], **MASK},
    DROP | {"where": document(0), **SHIFT},
]
FEWER_SIZES = (4, 1, 1, 1, 1, 10, 1, 1, 10, 1, 12, 1, 2, 11, 12, 12, 12, 12, 1, 3)

SEVERAL = {"step": [[3, 4]], "row": [[0, 0], [2, 2]]}  # each row of each step

# No step reads document 12, whose text the swap brings to document 0.
BROUGHT = [
    {"do": "replace", "where": document(12), "with_ids": [7], **MASK},
    {"do": "swap", "where": document(0), "to": document(12), **MASK},
]


@given(cases())
@example(("rows", (T + 1,) * 13, BROUGHT, 1))
@example(("packed", FEWER_SIZES, FEWER, 1))
@example(("packed", tuple(SIZES), REPEAT, 60))
@example(("windows", tuple(SIZES), [*ENDS, DROP | SHIFT], 1))
@example(("packed", tuple(SIZES), [*ENDS, DROP | SHIFT], 60))
@example(("rows", tuple(SIZES), ENDS, 1))
@example(("rows", tuple(SIZES), [DROP | {"where": SEVERAL}], 1))
@settings(max_examples=200, deadline=None)
def test_edited_batches_are_those_of_the_model_and_the_plan_covers_them(case):
    kind, sizes, edits, samples = case
    data, documents = data_of(kind, sizes)
    batches, plain = batches_of(data, edits, samples), rows_of(batches_of(data, samples=samples))
    try:
        got = rows_of(batches)
    except DataError as error:
        assert "nothing is left" in str(error) and "shift" in str(edits)
        return
    np.testing.assert_array_equal(got, model(kind, documents, edits, batches))
    steps = np.flatnonzero((got != plain).any(axis=1)) // ROWS + 1
    try:
        plan = batches.edits.plan()
    except DataError as error:
        number = int(re.match(r"edit (\d+) .* reads what is edited", str(error))[1])
        others = edits[: number - 1] + edits[number:]
        assert len(steps) == 0 or (got == model(kind, documents, others, batches)).all()
        return
    assert plan["rows"] >= len(steps) and plan["tokens"] >= (got != plain).sum()
    assert len(set(steps)) <= plan["steps"] and plan["rows"] <= ROWS * plan["steps"]
    if len(steps):
        assert FIRST <= plan["first"] <= steps[0] and steps[-1] <= plan["last"] <= LAST


SWAP = {"do": "swap", "where": sequence(3, 1), "to": sequence(9, 2), **MASK}
EQUAL = {"do": "swap", "where": document(2), "to": document(7), **MASK}  # both of 9 ids
BACK = {"do": "replace", "where": document(4), "with_document": 4}


def test_each_edit_of_a_place_reads_it_once():
    data, documents = data_of("packed")
    number = int(np.argmax([len(one) for one in documents]))
    insert = {"do": "insert", "where": document(number), "at": 1, "with": "a"} | SHIFT
    read = batches_of(data, [insert] * 40).edits.documents[number].read()
    (letter,) = data.tokenizer.encode("a", False).ids
    first, *rest = documents[number]
    assert read.tolist() == [first, *[letter] * 40, *rest]


def test_text_takes_the_place_of_an_empty_document():
    parts = [Part(None, 0, np.arange(1, 27, dtype=np.uint16))]
    tokens = Documents(parts, np.array([5, 0, 21], np.int32), None)
    data = TokenData(tokens, FlatTokens(parts), "packed", Letters())
    edit = {"do": "replace", "where": document(1), "with": "ab"} | SHIFT
    assert batches_of(data, [edit]).edits.documents[1].read().tolist() == [1, 2]


def test_words_in_the_place_of_a_sequence_get_no_end_of_text():
    data = data_of("windows")[0]
    rows = rows_of(batches_of(data)).reshape(LAST, ROWS, T + 1)[FIRST - 1]
    place = sequence(FIRST, int(np.flatnonzero(rows[:, -1] == END)[0]))
    edits = batches_of(data, [{"do": "replace", "where": place, "with": "ab"} | MASK]).edits
    ((_, text),) = edits.sequences.items()
    assert text.read()[:2].tolist() == [1, 2] and (text.read()[2:] < 0).all()


EDITS = [
    EQUAL,
    DROP | {"where": document(5), "fill": "blank"},
    SWAP,
    {"do": "repeat", "where": document(3), "to": sequence(7, 3), "fill": "reserve", "seed": 1},
    {"do": "reorder", "where": {"step": [[8, 11]]}, "seed": 2},
]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_positions_columns_and_prefetch_draw_the_same_rows(kind):
    data = data_of(kind)[0]
    edits = EDITS if kind == "rows" else [*EDITS, DROP | {"where": document(9)} | SHIFT]
    batches = batches_of(data, edits, 1)
    assert batches.edits.plan()["later_equal"] == (kind == "rows")
    says = "every other sequence is byte-equal" if kind == "rows" else "a shift moves the tokens"
    assert batches.edits.describe()[-1].startswith(says)
    whole, positions = [], []
    for _ in range(LAST * MICRO):
        positions.append(batches.position)
        whole.append(batches.next_rows())
    assert positions[-1]["epoch"] > 0 and not np.array_equal(
        whole, rows_of(batches_of(data, samples=1))
    )
    for rank in range(MICRO):
        own = batches_of(data, edits, 1)
        own.share(range(rank, rank + 1), MICRO)
        for expected in whole[rank::MICRO]:
            np.testing.assert_array_equal(own.next_rows(), expected)
    for at in range(len(whole)):
        again = batches_of(data, samples=1)
        again.seek(positions[at])
        again.edits = Edits(edits, data, again, MICRO, FIRST, LAST)
        for expected in whole[at : at + 2]:
            np.testing.assert_array_equal(again.next_rows(), expected)
    again = batches_of(data, edits, 1)
    again.share(range(1), 1, np.array([3, 0]))
    ahead = Prefetch(batches_of(data, edits, 1))
    for rows in map(np.array, whole):
        ids, targets = ahead.next()
        np.testing.assert_array_equal(ids, np.where(rows < 0, ~rows, rows)[:, :-1])
        np.testing.assert_array_equal(targets, rows[:, 1:])
        for got, expected in zip(again.next(), (ids, targets)):
            np.testing.assert_array_equal(got, expected[:, [3, 0]])
    ahead.close()


def test_text_of_a_run_is_found_and_replaced_by_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    texts = [f"number {i}: the cat sat on the mat" for i in range(19)]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(text)
    data = open_data(tmp_path / "texts", vocab_size=300)
    same = {"do": "replace", "where": {"text": "^number 1[12].*mat$"}, "with": texts[11], **MASK}
    where = {"text": r"[17]: the c", "document": [[0, 9]], "ids": [[5, 18]]}
    drop = {"do": "drop", "where": where, "fill": "blank"}
    batches, plain = (Batches(data.train, B, 16, SEED, vocab_size=300) for _ in range(2))
    batches.edits = edits = Edits([same, drop], data, batches, 1, 1, len(batches))
    assert [edit["where"] for edit in edits.checked] == [{"document": [[11, 12]]}, document(7)]
    ids = np.concatenate([rows[:, 1:] for rows in rows_of_epoch(batches)])
    before = np.concatenate([rows[:, 1:] for rows in rows_of_epoch(plain)])
    length = len(data.tokenizer.encode(texts[7]).ids)
    assert (ids < 0).sum() == length + 1
    twelve, eleven = (data.tokenizer.encode(n, add_special_tokens=False).ids for n in ("12", "11"))
    assert len(twelve) == len(eleven) and (ids != before).sum() == length + 1 + sum(
        a != b for a, b in zip(twelve, eleven)
    )


def test_reserve_text_without_an_end_of_text_begins_anywhere_and_goes_round():
    ids, begins = np.arange(1, 10, dtype=np.uint16), set()
    data = TokenData(data_of("windows")[0].train, FlatTokens([Part(None, 0, ids)]), "windows")
    for seed in range(9):
        edit = DROP | {"where": sequence(3, 0), "fill": "reserve", "seed": seed}
        row = batches_of(data, [edit]).edits.sequences[2 * ROWS].read().tolist()
        assert row == [(row[0] - 1 + i) % 9 + 1 for i in range(T + 1)]
        begins.add(row[0])
    assert len(begins) > 1


def rows_of_epoch(batches):
    return [batches.next_rows() for _ in range(len(batches))]


# ---- places that are not there -------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, edit, says",
    [
        (
            "packed",
            DROP | {"where": document(14)},
            r"^edit 2 \(drop\): document 14 is not there: there are 0 to 13",
        ),
        ("packed", BACK | {"with_document": 14} | MASK, "document 14 is not there"),
        ("rows", DROP | {"where": sequence(2, 0)}, "step 2 is not there: there are 3 to 12"),
        ("rows", DROP | {"where": sequence(13, 0)}, "step 13 is not there"),
        ("rows", DROP | {"where": sequence(3, 4)}, "row 4 is not there: there are 0 to 3"),
        ("rows", DROP | SHIFT, "preshuffled rows have a fixed length"),
        ("windows", DROP | {"where": {"text": "[0-9]"}}, "no document has .*text.*0-9"),
        ("windows", DROP | {"where": {"document": [[0, 2]], "ids": [[4, 6]]}}, "no document has"),
        ("windows", DROP | SHIFT | {"where": {"document": [[0, 13]]}}, "nothing is left"),
        ("windows", BACK | {"with_document": 5} | MASK, "13 tokens at 0 go beyond .* has 7"),
        ("windows", {"do": "insert", "where": document(1), "at": 1, "with": "a"}, "go beyond"),
        ("windows", {"do": "insert", "where": document(1), "at": 0, "with": "{"}, "id 27 is outs"),
        ("windows", DROP | {"do": "insert", "at": 8, "with": "a"} | SHIFT, "1 tokens at 8 go bey"),
        ("windows", EQUAL | {"to": document(3, 5)}, "to must name one place, but names 2"),
        (
            "windows",
            {"do": "repeat", "where": document(3, 5), "to": sequence(7, 3), **MASK},
            "where must name one place, but names 2",
        ),
        ("windows", {"do": "rate", "steps": [2, 5], "factor": 0.5}, "there are 3 to 12"),
        ("windows", {"do": "rate", "steps": [5, 13], "factor": 0.5}, "there are 3 to 12"),
    ],
)
def test_edits_that_name_nothing_are_errors(kind, edit, says):
    with pytest.raises(DataError, match=says):
        batches_of(data_of(kind)[0], [EQUAL, edit]).edits.plan()


def test_edit_whose_documents_no_step_reads_is_an_error():
    data, documents = data_of("packed")
    batches, unread = batches_of(data), []
    edits = lambda *lists: [DROP | {"where": document(*numbers)} for numbers in lists]
    plan = lambda *lists: Edits(edits(*lists), data, batches, MICRO, 1, 1).plan()
    for number in range(len(documents)):
        try:
            assert plan([number])["first"] == 1
        except DataError as error:
            assert "no step from 1 to 1 reads what is edited" in str(error)
            unread.append(number)
    assert 0 < len(unread) < len(documents)
    assert plan(range(len(documents)))["rows"] == ROWS
    with pytest.raises(DataError, match=r"edit 2 \(drop\): no step from 1 to 1 reads"):
        plan(range(len(documents)), unread)
    (read, *_) = {*range(len(documents))} - {*unread}
    swap = {"do": "swap", "where": document(unread[0]), "to": document(read), **MASK}
    assert Edits([swap], data, batches, MICRO, 1, 1).plan()["steps"] == 1


def test_data_without_documents_a_tokenizer_or_held_out_tokens_are_errors():
    ids, wrong = (FlatTokens([Part(None, 0, np.array(x))]) for x in (range(1, 27), [27]))
    reserve = DROP | {"where": sequence(3, 0), "fill": "reserve", "seed": 1}
    for tokenizer, held_out, edit, says in (
        (None, ids, DROP, "need a tokenizer"),
        (Letters(), ids, DROP, "no end of text within"),
        (None, ids, DROP | {"where": sequence(3, 0), "fill": "blank"}, "need a tokenizer"),
        (None, ids.between(0, 0), reserve, "no token is held out"),
        (None, wrong, reserve, "the edited data of micro-batch 4: id 27 is outside"),
        (SimpleNamespace(eos_token_id=28), ids, reserve | {"fill": "blank"}, "id 28 is outside"),
    ):
        data = TokenData(ids, held_out, "letters", tokenizer)
        with naming(says), pytest.raises(DataError, match=says):
            rows_of(batches_of(data, [edit]))


# ---- the file ------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path):
    """The edits of docs/replay.md, as they are written."""
    for name in ("memorised.txt", "first.safetensors"):
        (tmp_path / name).write_text("4\n\n9\r\n10\n")
    text = (ROOT / "docs/replay.md").read_text()
    blocks = re.findall(r"^```toml\n(\[\[edit.*?)^```", text, re.M | re.S)
    (tmp_path / "edits.toml").write_text("\n".join(blocks))
    return read_toml(tmp_path / "edits.toml")["edit"]


def test_examples_of_the_page_are_read(tmp_path, page):
    edits = read_edits(tmp_path / "edits.toml")
    assert {edit["do"] for edit in edits} == {*FORMS} and json.loads(json.dumps(edits)) == edits
    assert {"ids": [[4, 4], [9, 10]]} in [edit.get("where") for edit in edits]
    assert str(tmp_path / "first.safetensors") in [edit.get("from") for edit in edits]
    assert check_edits(page, tmp_path) == edits
    insert = {"do": "insert", "where": {"document": 1}, "with": "a"}
    assert check_edits([insert], tmp_path)[0]["at"] == 0
    (tmp_path / "edits.toml").write_text("# nothing")
    assert read_edits(tmp_path / "edits.toml") == []


def test_ranges_of_documents_are_joined(tmp_path):
    for one, joined in (
        (7, [[7, 7]]), ("4:4", [[4, 4]]), ([9, "2:3", 4], [[2, 4], [9, 9]]),
        (["0:100", "20:30"], [[0, 100]]), (["20:30", "25:40", 30], [[20, 40]]),
    ):  # fmt: skip
        edit = {"do": "drop", "where": {"document": one}}
        assert check_edits([edit], tmp_path)[0]["where"] == {"document": joined}


BAD = [True, -1, 1.5, float("nan"), [], [-1], [[1]], {}, {"x": 1}]


def spoiled(table):
    """Yield keys of an edit, and the edit with a bad value there, or with one key more."""
    for key, value in table.items():
        yield from ((key, {**table, key: bad}) for bad in BAD)
        if isinstance(value, dict):
            yield from ((name, {**table, key: inner}) for name, inner in spoiled(value))
    yield "width", {**table, "width": 1}


def test_bad_value_and_unknown_key_are_named(tmp_path, page):
    for key, edit in (pair for one in page for pair in spoiled(one)):
        with (
            naming(edit),
            pytest.raises(DataError, match=f"^edits: edit 1, .*{key}|cannot be read"),
        ):
            check_edits([edit], tmp_path)


@pytest.mark.parametrize(
    "text, says",
    [
        ("[[edit]", "no TOML"),
        ("edit = 3", "must hold tables .* but holds an edit that is no table"),
        ("name = 3", "must hold tables .* but holds name"),
        ("do = 'drop'", "where: is needed by drop"),
        ("do = 'replace'\nwhere = {step = 1}", "with, with_ids, with_document: exactly one"),
        ("where = {row = 1}", "where: names documents, or a step with its rows: row"),
        ("where = {step = 1, document = 2}", "where: names documents, or a step"),
        ("where = {document = '9:3'}", "where, document: must be .*'9:3'"),
        ("where = {text = '('}", "where, text: no regular expression"),
        ("where = {ids = 'none'}", "edit 1, .*/none: cannot be read"),
        ("where = {ids = 'bad'}", "where, ids: .*bad: must be .* but is 'x'"),
        ("where = {step = 1}\nfill = 'shift'", "fill: a sequence has a fixed length"),
        ("where = {step = 1}\nfill = 'reserve'", "seed: goes with fill"),
        ("where = {step = 1}\nseed = 1", "seed: goes with fill"),
        ("do = 'insert'\nwhere = {step = 1}\nwith = 'x'\nfill = 'mask'", 'fill: must be "shift"'),
        ("do = 'swap'\nwhere = {step = 1}\nto = {document = 2}", "to: must name a document"),
        ("do = 'swap'\nwhere = {document = 2}\nto = {step = 1}", "to: must name a document"),
        (
            "do = 'repeat'\nwhere = {document = 1}\nto = {step = 1}\nfill = 'shift'",
            "fill: a sequence has a fixed length",
        ),
        ("do = 'repeat'\nwhere = {step = 1}\nto = {document = 2}", "to: .* table of step, row"),
        ("do = 'reorder'\nwhere = {step = 1, row = 2}\nseed = 1", "where: .* table of step, but"),
        ("do = 'rate'\nsteps = [5, 3]\nfactor = 2", r"steps: must be \[first, last\], from 1 on"),
        ("do = 'rate'\nsteps = [0, 3]\nfactor = 2", r"steps: must be \[first, last\], from 1 on"),
        ("do = 'rate'\nsteps = [1, 3]\nfactor = 2\nto = 0", "exactly one of them is needed"),
        ("do = 'weights'\nparts = '*'\nfrom = 'none'", "from: .*none: no such file"),
    ],
)
def test_file_of_edits_names_what_is_wrong(tmp_path, text, says):
    (tmp_path / "bad").write_text("3\nx\n")
    text = f"do = 'drop'\n{text}" if text.startswith("where") else text
    text = f"[[edit]]\n{text}\n" if text.startswith("do") else text
    (tmp_path / "edits.toml").write_text(text)
    with pytest.raises(DataError, match=rf"^{tmp_path}/edits.toml: .*{says}"):
        read_edits(tmp_path / "edits.toml")
