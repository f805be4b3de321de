"""Tables and their three written forms."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshes.errors import ShardingError
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.table import KINDS, Action, Table, action

actions = st.builds(
    action, st.sampled_from(KINDS), st.integers(0, 999_999), chunk=st.integers(0, 3)
)  # fmt: skip


@st.composite
def tables(draw):
    """Any table, legal or not, that names every chunk its placement has."""
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks = tuple(rank for _ in range(chunks) for rank in draw(st.permutations(range(stages))))
    rows = [tuple(draw(st.lists(actions.filter(lambda a: a.chunk < chunks), max_size=8))) for _ in range(stages)]
    rows = tuple((action("F", 0, chunk=chunks - 1), *row) for row in rows)
    return Table(name=draw(st.sampled_from(["mine", "zb_h1"])), placement=Placement(ranks=ranks), rows=rows)


@given(tables())
def test_text_csv_and_json_round_trip(table):
    assert Table.parse(str(table)) == table
    assert Table.parse(table.to_csv()) == table
    assert Table.from_json(table.to_json()) == table
    assert hash(Table.parse(table.to_csv())) == hash(table)


@given(actions)
def test_action_text_round_trips(cell):
    assert Action.parse(str(cell)) == cell
    assert Action.parse(f"{cell.kind}{cell.microbatch}.{cell.chunk}") is cell, "the chunk may always be written"


def test_action_text_leaves_chunk_zero_out():
    assert str(action("F", 3, chunk=1)) == "F3.1"
    assert str(action("B", 3)) == "B3"


def test_idle_cells_blank_lines_and_comments_are_allowed():
    text = "\ufeff# my own schedule, after a night's thought\r\nF0,F1,,B0,.,B1\r\n\r\nF0,B0,,F1,-,B1,\r\n"
    table = Table.parse(text, name="mine")
    assert (table.name, table.num_ranks, table.num_chunks, table.num_microbatches) == ("mine", 2, 1, 2)
    assert str(table) == "# schedule=mine placement=loop\nF0 F1 B0 B1\nF0 B0 F1 B1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "F0,F1,B0,B1\nF0,X1,B0",
            "mine, line 2, column 4: 'X1' is not an action\n  F0,X1,B0\n     ^^\n  fix: F, B, I or W",
        ),
        (
            "# plcement=v\nF0,B0",
            "mine, line 1: unknown key 'plcement'\n  # plcement=v\n    ^^^^^^^^\n  fix: known keys",
        ),
        ("# placement=w\nF0,B0", "placement 'w' is unknown"),
        (
            "# placement=0-0\nF0,B0",
            "placement 0-0 has 1 ranks with 2 chunks each, the table has 1 rows and uses 1 chunks",
        ),
        (
            "# placement=0-1-1\nF0,B0\nF0,B0",
            "every rank must hold equally many virtual stages; rank 0 holds 1, rank 1 holds 2",
        ),
        ("\n\n", "mine: no actions found\n  fix: one line per rank"),
        ("F-1,B0", "'F-1' is not an action"),
        ("F0;B0", "'F0;B0' is not an action"),
        ("F0.12345", "is not an action"),
    ],
)
def test_malformed_text_is_pointed_at(text, message):
    with pytest.raises(ShardingError) as error:
        Table.parse(text, name="mine")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) <= 10


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{", '{"name": "x", "rows": []}', '{"name": "x", "placement": ["0"], "rows": [["F0"]]}', "null"],
)
def test_malformed_json_is_an_error_for_people(text):
    with pytest.raises(ShardingError, match="not a schedule in JSON"):
        Table.from_json(text)


@given(st.text(max_size=60))
def test_any_text_is_a_table_or_an_error_for_people(text):
    try:
        assert isinstance(Table.parse(text), Table)
    except ShardingError as error:
        assert len(str(error).splitlines()) <= 10


KEYS = st.sampled_from(["name", "placement", "rows"])
LEAVES = st.none() | st.integers() | st.text(max_size=4)


@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)))
def test_any_json_is_a_table_or_an_error_for_people(value):
    with contextlib.suppress(ShardingError):
        assert isinstance(Table.from_json(json.dumps(value)), Table)


def test_rows_must_be_the_placements_ranks():
    with pytest.raises(ShardingError, match="has 1 rows for 2 ranks"):
        Table(name="mine", placement=Placement.loop(2), rows=((action("F", 0),),))
