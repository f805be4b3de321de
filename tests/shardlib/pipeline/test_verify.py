"""Verification: what it catches, and how it says so."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.errors import ShardingError
from shardlib.pipeline.graph import build_graph
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules import ALL, build
from shardlib.pipeline.table import KINDS, Table, action
from shardlib.pipeline.verify import verify


def replace_row(table, rank, row):
    rows = tuple(tuple(row) if number == rank else old for number, old in enumerate(table.rows))
    return Table(name=table.name, placement=table.placement, rows=rows)


def refused(table, **options):
    with pytest.raises(ShardingError) as error:
        verify(table, **options)
    return str(error.value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_single_cell_mutation_is_caught(data):
    schedule = data.draw(st.sampled_from(ALL))
    stages = data.draw(st.integers(1, 5))
    microbatches = data.draw(st.integers(1, 4)) * (stages if schedule.divides else 1)
    table = schedule.build(stages=stages, microbatches=microbatches)
    rank = data.draw(st.integers(0, stages - 1))
    row = list(table.rows[rank])
    position = data.draw(st.integers(0, len(row) - 1))
    other = action(
        data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, microbatches)), chunk=data.draw(st.integers(0, 2))
    )
    change = data.draw(st.sampled_from(["replace", "remove", "insert"]))
    if change == "replace":
        if other == row[position]:
            return
        row[position] = other
    elif change == "remove":
        del row[position]
    else:
        row.insert(position, other)
    refused(replace_row(table, rank, row), microbatches=microbatches)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_every_single_cell_mutation_of_a_4_by_8_table_is_caught(schedule):
    table = schedule.build(stages=4, microbatches=8)
    others = [action(kind, j, chunk=chunk) for kind in KINDS for j in range(9) for chunk in range(3)]
    for rank, row in enumerate(table.rows):
        for position, cell in enumerate(row):
            refused(replace_row(table, rank, row[:position] + row[position + 1 :]))
            for other in others:
                if other != cell:
                    refused(replace_row(table, rank, (*row[:position], other, *row[position + 1 :])))


def test_swapping_what_depends_on_each_other_is_caught_in_its_row():
    table = Table.parse("F0 B0 F1 B1\nF0 B0 F1 B1", name="mine")
    message = refused(replace_row(table, 1, [table.rows[1][n] for n in (0, 1, 3, 2)]))
    assert message == (
        "schedule 'mine' is not legal: rank 1, cell 3: B1 needs F1, which stands after it in its own row\n"
        "  rank 1: F0 B0 [B1] [F1]\n"
        "  fix: every rank does F, then B (or I, then W), of each microbatch and chunk, once, after what it needs"
    )


def test_a_deadlock_names_who_waits_for_whom():
    message = refused(Table.parse("F0 B0 F1 B1\nF1 F0 B0 B1", name="mine"))
    assert message.splitlines()[:4] == [
        "schedule 'mine' is not legal: rank 0, cell 2: deadlock: rank 0 waits at B0 for B0 on rank 1, "
        "which comes after F1 there",
        "  rank 0: F0 [B0] F1 B1",
        "  rank 1: F1 F0 [B0] B1",
        "also rank 1, cell 1: deadlock: rank 1 waits at F1 for F1 on rank 0, which comes after B0 there",
    ]


def test_missing_doubled_and_half_backwards_are_named():
    assert "B1 is done twice" in refused(Table.parse("F0 B0 F1 B1 B1"))
    assert "I1 and W1 (or B1) is missing on rank 0" in refused(Table.parse("F0 B0 F1"))
    assert "W0 is missing on rank 0" in refused(Table.parse("F0 I0"))
    assert "I0 repeats a part of B0" in refused(Table.parse("F0 B0 I0 W0"))
    assert "F1 is missing on rank 1" in refused(Table.parse("F0 B0 F1 B1\nF0 B0 B1"))
    assert "F7 does not exist: there are 2 microbatches and 1 chunks" in refused(
        Table.parse("F0 F7 B0 F1 B1"), microbatches=2
    )


def test_a_missing_cell_is_drawn_at_the_end_of_the_row():
    assert "  rank 0: F0 B0 [ ]\n" in refused(Table.parse("F0 B0"), microbatches=2)


def test_the_wrong_placement_is_offered_as_the_fix():
    table = build("zb_v", stages=3, microbatches=6)
    wrong = Table(name="mine", placement=Placement.loop(3, chunks=2), rows=table.rows)
    assert "put the line '# placement=v' first" in refused(wrong)


def test_long_rows_are_cropped_around_the_cell_and_many_failures_counted():
    table = build("1f1b", stages=8, microbatches=64)
    row = table.rows[3]
    message = refused(replace_row(table, 3, (*row[:60], row[0], *row[61:])))
    lines = message.splitlines()
    assert "... " in lines[1] and lines[1].endswith(" ...") and "[F0]" in lines[1]
    assert max(map(len, lines[1:-1])) <= 120 and len(lines[1]) <= 80
    everything = refused(Table.parse("F0 B0"), microbatches=100)
    assert len(everything.splitlines()) <= 10 and "and 193 more failures" in everything


def test_sizes_that_were_promised_are_checked():
    table = build("1f1b", stages=2, microbatches=4)
    assert "has 2 rows for 4 stages" in refused(table, stages=4)
    assert "F4 is missing" in refused(table, microbatches=5)


def test_activation_bounds_hold_for_any_timing():
    assert verify(build("1f1b", stages=4, microbatches=8)).activations == (4, 3, 2, 1)
    assert verify(build("gpipe", stages=4, microbatches=8)).activations == (8, 8, 8, 8)
    assert verify(build("1f1b", stages=4, microbatches=8), max_activations=4)
    message = refused(build("1f1b", stages=4, microbatches=8), max_activations=3)
    assert "rank 0, cell 4: 4 activations are alive here, more than max_activations=3" in message
    assert "  rank 0: F0 F1 F2 [F3] B0" in message


def test_message_bounds_are_reached_by_some_timing_and_never_passed():
    """Random pauses: the most messages waiting at a rank never pass the bound; with many draws they reach it."""
    random_numbers = random.Random(0)
    for name in ("1f1b", "gpipe", "zb_h1", "zb_v"):
        table = build(name, stages=3, microbatches=6)
        bound, reached = verify(table).messages, [0, 0, 0]
        for _ in range(300):
            for rank, waiting in enumerate(most_waiting(table, random_numbers)):
                assert waiting <= bound[rank]
                reached[rank] = max(reached[rank], waiting)
        assert tuple(reached) == bound, name


def most_waiting(table, random_numbers):
    """Runs a table with random pauses and speeds; per rank the most messages that had been sent and not used."""
    graph = build_graph(table)
    slow = [random_numbers.choice((1, 1, 50)) for _ in range(table.num_ranks)]
    start, end = {}, {}
    for index in graph.order:
        rank = graph.ranks[index]
        ready = [end[need] for need in graph.needs[index]]
        ready += [end[index - 1]] if index > graph.starts[rank] else []
        start[index] = max(ready, default=0) + slow[rank] * random_numbers.choice((0, 0, 90))
        end[index] = start[index] + slow[rank]
    most = [0] * table.num_ranks
    for rank in range(table.num_ranks):
        events = []
        for index in graph.row(rank):
            for need in graph.needs[index]:
                if graph.ranks[need] != rank:
                    events += [(end[need], 0, 1), (start[index], 1, -1)]
        waiting = 0
        for _, _, change in sorted(events):
            waiting += change
            most[rank] = max(most[rank], waiting)
    return most
