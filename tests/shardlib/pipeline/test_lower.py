"""Lowering: the closed forms, the proof of every schedule, and the proof of the proof by mutations."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.errors import ShardingError
from shardlib.pipeline.costs import Costs
from shardlib.pipeline.lower import lower
from shardlib.pipeline.prove import check
from shardlib.pipeline.schedules import ALL, build
from shardlib.pipeline.simulate import simulate
from shardlib.pipeline.table import Table


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ALL), st.integers(1, 6), st.integers(1, 10), st.integers(1, 4), st.sampled_from(["fused", "unit"])
)
def test_every_schedule_lowers_in_both_forms(schedule, stages, microbatches, chunks, form):
    if schedule.why_not(stages=stages, chunks=chunks, microbatches=microbatches):
        return
    check(lower(schedule.build(stages=stages, chunks=chunks, microbatches=microbatches), form=form))


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_every_schedule_lowers_at_many_sizes(schedule):
    for stages in range(1, 13):
        for microbatches in (1, 2, 3, stages, 2 * stages, 3 * stages):
            for chunks in range(1, 5):
                if schedule.why_not(stages=stages, chunks=chunks, microbatches=microbatches) is None:
                    table = schedule.build(stages=stages, chunks=chunks, microbatches=microbatches)
                    for form in ("fused", "unit"):
                        check(lower(table, form=form))


def test_fused_1f1b_has_the_closed_form():
    """F of microbatch m on stage s at tick s+m, B at 2(p-1)-s+m, 2p-1 slots for what F leaves."""
    stages, microbatches = 4, 8
    arrays = (lowered := lower(build("1f1b", stages=stages, microbatches=microbatches))).arrays()
    for stage in range(stages):
        for microbatch in range(microbatches):
            assert arrays["F.microbatch"][stage + microbatch, stage] == microbatch
            assert arrays["B.microbatch"][2 * (stages - 1) - stage + microbatch, stage] == microbatch
    assert lowered.num_ticks == microbatches + 2 * (stages - 1)
    sizes = {buffer.name: buffer.size for buffer in lowered.buffers}
    assert sizes == {"input": 1, "saved_input": 7, "residual_input": 7, "residual_weight": 7, "cotangent": 1}


def test_fused_interleaved_has_the_closed_form():
    """F of turn k on rank r at tick r+k; B at VS-1+(S-1-r)+k."""
    stages, chunks, microbatches = 4, 2, 8
    lowered = lower(build("interleaved_1f1b", stages=stages, chunks=chunks, microbatches=microbatches), form="fused")
    arrays = lowered.arrays()
    for rank in range(stages):
        for turn in range(chunks * microbatches):
            chunk, microbatch = (turn // stages) % chunks, turn // (stages * chunks) * stages + turn % stages
            tick = chunks * stages - 1 + (stages - 1 - rank) + turn
            assert (arrays["F.microbatch"][rank + turn, rank], arrays["F.chunk"][rank + turn, rank]) == (
                microbatch,
                chunk,
            )
            assert (arrays["B.microbatch"][tick, rank], arrays["B.chunk"][tick, rank]) == (
                microbatch,
                chunks - 1 - chunk,
            )
    assert lowered.buffer("input").size == lowered.buffer("cotangent").size == 1, "messages are used on arrival"


def test_buffers_do_not_grow_with_the_microbatches():
    for name, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2), ("v_half", 2), ("v_min", 2)):
        few, many = (lower(build(name, stages=4, chunks=chunks, microbatches=m)).buffers for m in (16, 32))
        assert [buffer.size for buffer in few] == [buffer.size for buffer in many], name


def test_residual_slots_are_the_simulators_peak():
    """Chunks in flight from F to I, in the lockstep simulation, are the slots of what I needs of F."""
    for schedule in ALL:
        table = schedule.build(stages=4, microbatches=8)
        for form in ("fused", "unit"):
            simulation = simulate(table, lockstep=True, form=form)
            size = lower(table, form=form).buffer("residual_input").size
            assert size == max(simulation.peak_in_flight) * table.num_chunks, (schedule.name, form)


def test_costs_choose_the_form():
    table = build("zb_h1", stages=4, microbatches=8)
    assert lower(table).ticks.form == "unit"
    assert lower(build("1f1b", stages=4, microbatches=8)).ticks.form == "fused"
    lopsided = Costs.parse("F=1,B=9,W=1")
    chosen = lower(table, lopsided).ticks.form
    other = {"unit": "fused", "fused": "unit"}[chosen]
    assert (
        simulate(table, lopsided, lockstep=True, form=chosen).makespan
        <= simulate(table, lopsided, lockstep=True, form=other).makespan
    )


def test_a_memory_limit_chooses_the_form_or_says_what_would_fit():
    table = build("1f1b", stages=4, microbatches=8)
    assert lower(table, max_activations=7).ticks.form == "fused"
    assert lower(table, max_activations=4).ticks.form == "unit"
    with pytest.raises(ShardingError) as error:
        lower(table, max_activations=3)
    assert "needs unit ticks 4 and fused ticks 7 live activations, more than max_activations=3" in str(error.value)
    assert "fix: max_activations=4" in str(error.value)
    with pytest.raises(ShardingError, match="needs fused ticks 7 live activations, more than max_activations=4"):
        lower(table, form="fused", max_activations=4)


def test_permutes_run_only_where_some_rank_sends():
    lowered = lower(build("1f1b", stages=4, microbatches=8))
    assert [channel.name for channel in lowered.channels] == ["F+1", "B+3"]
    assert lowered.channels[0].pairs == ((0, 1), (1, 2), (2, 3))
    arrays = lowered.arrays()
    assert list(np.flatnonzero(arrays["send.F+1"])) == list(range(10))
    assert list(np.flatnonzero(arrays["send.B+3"])) == list(range(3, 13))


def test_a_v_hands_over_at_its_turn_without_a_permute():
    lowered = lower(build("zb_v", stages=4, microbatches=8))
    assert [(channel.name, channel.pairs) for channel in lowered.channels if channel.shift == 0] == [
        ("F+0", ((3, 3),)),
        ("B+0", ((3, 3),)),
    ]


def test_arrays_are_what_a_scan_takes():
    arrays = lower(build("zb_h1", stages=3, microbatches=4)).arrays()
    assert {array.dtype for array in arrays.values()} == {np.dtype("int32")}
    assert {array.shape for name, array in arrays.items() if not name.startswith("send.")} == {(14, 3)}
    assert arrays["send.F+1"].shape == (14,)
    assert {"F.microbatch", "I.chunk", "W.microbatch", "stash.write.I", "stash.read.W", "input.write.F+1"} <= set(
        arrays
    )


def test_illegal_tables_are_not_lowered():
    with pytest.raises(ShardingError, match="is not legal"):
        lower(Table.parse("F0 B1"))


def grids(lowered):
    """(how to put a changed grid back, the grid) for every grid of a lowered table."""
    for number, work in enumerate(lowered.work):
        for field in ("microbatch", "chunk"):

            def put_work(grid, number=number, field=field):
                works = list(lowered.work)
                works[number] = dataclasses.replace(works[number], **{field: grid})
                return dataclasses.replace(lowered, work=tuple(works))

            yield put_work, getattr(work, field)
    for number, buffer in enumerate(lowered.buffers):
        for verb in ("writes", "reads"):
            for place, access in enumerate(getattr(buffer, verb)):

                def put_buffer(grid, number=number, verb=verb, place=place):
                    buffers = list(lowered.buffers)
                    accesses = list(getattr(buffers[number], verb))
                    accesses[place] = dataclasses.replace(accesses[place], slots=grid)
                    buffers[number] = dataclasses.replace(buffers[number], **{verb: tuple(accesses)})
                    return dataclasses.replace(lowered, buffers=tuple(buffers))

                yield put_buffer, access.slots
    sends = lowered.ticks.sends
    for number, flags in enumerate(sends):

        def put_sends(grid, number=number):
            changed = (*sends[:number], tuple(bool(flag) for (flag,) in grid), *sends[number + 1 :])
            return dataclasses.replace(lowered, ticks=dataclasses.replace(lowered.ticks, sends=changed))

        yield put_sends, tuple((bool(flag),) for flag in flags)


def mutations(lowered):
    """Every single entry changed: to nothing, to 0, to one more; a flag to the other."""
    for put, grid in grids(lowered):
        for tick, row in enumerate(grid):
            for rank, old in enumerate(row):
                for new in (not old,) if isinstance(old, bool) else (-1, 0, old + 1):
                    if new != old:
                        changed = (*row[:rank], new, *row[rank + 1 :])
                        yield put((*grid[:tick], changed, *grid[tick + 1 :])), f"[{tick}][{rank}] {old} -> {new}"


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "form"),
    [("1f1b", 3, 4, "fused"), ("zb_h1", 2, 3, "unit"), ("zb_v", 2, 2, "unit"), ("dualpipe_v", 2, 2, "fused")],
)
def test_every_single_change_of_a_lowered_table_breaks_the_proof(name, stages, microbatches, form):
    lowered = lower(build(name, stages=stages, microbatches=microbatches), form=form)
    survived = []
    for changed, what in mutations(lowered):
        try:
            check(changed)
        except AssertionError:
            continue
        survived.append(what)
    assert not survived


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_buffer_size_breaks_the_proof(change):
    lowered = lower(build("1f1b", stages=3, microbatches=4))
    for number, buffer in enumerate(lowered.buffers):
        buffers = list(lowered.buffers)
        buffers[number] = dataclasses.replace(buffer, size=buffer.size + change)
        with pytest.raises(AssertionError):
            check(dataclasses.replace(lowered, buffers=tuple(buffers)))
