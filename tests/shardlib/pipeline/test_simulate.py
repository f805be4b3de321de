"""Simulation against an independent one, against hand-counted cases, and against the figures of FORMULAS."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.errors import ShardingError
from shardlib.pipeline.costs import Costs
from shardlib.pipeline.schedules import ALL, build
from shardlib.pipeline.simulate import memory_steps, simulate
from shardlib.pipeline.table import Table


def naive_ends(table, forward, input_part, weight, link):
    """Ends of all actions by going over the table again and again until nothing changes: no graph, no order."""
    ranks = table.placement.ranks
    last, ends = len(ranks) - 1, {}
    cells = [
        (rank, position, cell, table.placement.stage(rank, chunk=cell.chunk))
        for rank, row in enumerate(table.rows)
        for position, cell in enumerate(row)
    ]
    at = {}
    while True:
        changed = False
        for rank, position, cell, stage in cells:
            needs = [(rank, position - 1, 0)] if position else []
            if cell.kind == "F" and stage:
                needs.append(at.get(("F", stage - 1, cell.microbatch)))
            if cell.kind in "BI":
                needs.append(at.get(("F", stage, cell.microbatch)))
                if stage < last:
                    needs.append(at.get(("BI", stage + 1, cell.microbatch)))
            if cell.kind == "W":
                needs.append(at.get(("BI", stage, cell.microbatch)))
            if None in needs or any(need[:2] not in ends for need in needs):
                continue
            start = max((ends[need[:2]] + (link if need[0] != rank else 0) for need in needs), default=Fraction(0))
            time = {"F": forward, "B": None, "I": input_part, "W": weight}[cell.kind]
            end = start + (input_part[stage] + weight[stage] if time is None else time[stage])
            if ends.get((rank, position)) != end:
                ends[rank, position] = end
                at[cell.kind if cell.kind in "FW" else "BI", stage, cell.microbatch] = (rank, position)
                changed = True
        if not changed:
            return ends


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_free_running_equals_an_independent_simulation(data):
    schedule = data.draw(st.sampled_from(ALL))
    stages = data.draw(st.integers(1, 4))
    microbatches = data.draw(st.integers(1, 4)) * (stages if schedule.divides else 1)
    table = schedule.build(stages=stages, microbatches=microbatches)
    numbers = st.lists(st.integers(1, 9), min_size=len(table.placement.ranks), max_size=len(table.placement.ranks))
    forward, input_part, weight = (data.draw(numbers) for _ in range(3))
    link = Fraction(data.draw(st.integers(0, 12)), 4)
    costs = Costs(
        forward=tuple(forward),
        backward=tuple(a + b for a, b in zip(input_part, weight)),
        weight=tuple(weight),
        link=link,
    )
    if table.num_chunks > 1 and len(table.placement.ranks) == stages:
        return
    simulation = simulate(table, costs)
    ends = naive_ends(table, *costs_per_stage(costs, table), link)
    for rank, row in enumerate(simulation.spans):
        for position, (_, end) in enumerate(row):
            assert end == float(ends[rank, position])
    assert simulation.makespan == float(max(ends.values()))


def costs_per_stage(costs, table):
    return [[Fraction(number) for number in kind] for kind in (
        costs.forward, [b - w for b, w in zip(costs.backward, costs.weight)], costs.weight)]  # fmt: skip


def test_two_stages_by_hand():
    """F=1, B=2, link=1/2: the second stage starts at 1.5 and hands back at 4.5, to arrive at 5."""
    simulation = simulate(Table.parse("F0 F1 B0 B1\nF0 B0 F1 B1"), Costs.parse("F=1,B=2,W=1,link=0.5"))
    assert simulation.spans == (
        ((0, 1), (1, 2), (5, 7), (8, 10)),
        ((1.5, 2.5), (2.5, 4.5), (4.5, 5.5), (5.5, 7.5)),
    )
    assert simulation.makespan == 10
    assert simulation.idle_time == (4, 4)
    assert simulation.bubble_fraction == 0.4
    assert simulation.span_bubble_fraction == 0.4
    assert simulation.num_messages == 4
    assert simulation.peak_activations == (2, 1)


def test_span_leaves_the_wait_before_the_first_action_out():
    simulation = simulate(Table.parse("F0 B0\nF0 B0"))
    assert simulation.bubble_fraction == 0.5
    assert simulation.span_bubble_fraction == 0.5, "rank 0 waits within its span"
    simulation = simulate(build("zb_h2", stages=4, microbatches=8))
    assert simulation.span_bubble_fraction == 0 < simulation.bubble_fraction


def test_the_stash_is_counted_by_its_own_size():
    table = Table.parse("F0 I0 F1 I1 W0 W1")
    for stash, peak in (("1", 2), ("0.5", 1.5), ("0", 1)):
        simulation = simulate(table, Costs.parse(f"F=1,B=2,W=1,stash={stash}"))
        assert simulation.peak_activations == (peak,)
        assert simulation.peak_in_flight == (1,)
        assert simulation.peak_stash == (2 * float(stash),)


def test_uneven_activations_and_stages():
    simulation = simulate(build("1f1b", stages=2, microbatches=4), Costs.parse("F=1:3,B=2:6,W=1:3,activation=1:2.5"))
    assert simulation.work == (12, 36)
    assert simulation.makespan == 1 + 36 + 2, "the slow stage never waits; before it one F, after it one B"
    assert simulation.peak_activations == (2, 2.5)


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("lockstep", [False, True])
def test_memory_curve_peaks_where_the_simulation_says(schedule, lockstep):
    simulation = simulate(
        schedule.build(stages=4, microbatches=8), Costs.parse("F=1,B=2.2,W=0.9,link=0.1,stash=0.75"), lockstep=lockstep
    )
    for rank in range(4):
        curve = memory_steps(simulation, rank)
        assert max(live for _, live in curve) == simulation.peak_activations[rank]
        assert curve[-1][1] == 0
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)


# FORMULAS.md 2, "Lockstep at p=8, m=32, whole backward 2F".


def test_fused_1f1b_is_the_ideal_1f1b_with_2p_1_in_flight():
    table = build("1f1b", stages=8, microbatches=32)
    ideal, fused = simulate(table), simulate(table, lockstep=True)
    assert fused.ticks is not None and fused.ticks.form == "fused"
    assert fused.makespan == ideal.makespan == 117
    assert fused.bubble_fraction == float(Fraction(7, 39))
    assert max(fused.peak_activations) == 15 and max(ideal.peak_activations) == 8


def test_fused_1f1b_equals_the_ideal_at_every_size():
    for stages in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 5, 16):
            table = build("1f1b", stages=stages, microbatches=microbatches)
            fused = simulate(table, lockstep=True, form="fused")
            assert fused.makespan == simulate(table).makespan
            assert fused.ticks is not None and fused.ticks.num_ticks == microbatches + 2 * (stages - 1)


def test_masked_1f1b_pays_for_every_tick():
    simulation = simulate(build("1f1b", stages=8, microbatches=32), lockstep=True, idle="mask", form="fused")
    assert simulation.makespan == 46 * 3
    assert round(100 * simulation.bubble_fraction, 1) == 30.4


def test_classic_1f1b_with_one_action_per_tick():
    simulation = simulate(build("1f1b", stages=8, microbatches=32), lockstep=True, form="unit")
    assert round(100 * simulation.bubble_fraction, 1) == 35.1
    assert max(simulation.peak_activations) == 8


def test_unit_tick_zb_h1_has_p_1_idle_units():
    simulation = simulate(build("zb_h1", stages=8, microbatches=32), lockstep=True)
    assert simulation.ticks is not None and (simulation.ticks.form, simulation.ticks.num_ticks) == ("unit", 103)
    assert simulation.idle_time == (7,) * 8
    assert round(100 * simulation.bubble_fraction, 1) == 6.8
    assert max(simulation.peak_activations) <= 1.5 * 8


def test_interleaved_in_lockstep_is_as_fast_as_free_running():
    table = build("interleaved_1f1b", stages=4, chunks=2, microbatches=8)
    fused = simulate(table, lockstep=True)
    assert fused.makespan == simulate(table).makespan
    assert fused.ticks is not None and fused.ticks.num_ticks == 2 * 4 - 1 + 3 + 2 * 8


def test_a_link_lengthens_only_ticks_that_send():
    table = build("1f1b", stages=2, microbatches=2)
    without, with_link = (simulate(table, Costs.parse(f"F=1,B=2,W=1,link={link}"), lockstep=True) for link in (0, 0.25))
    assert with_link.permutes == 4
    assert with_link.makespan == without.makespan + 3 * 0.25, "of 4 ticks the last sends nothing"


def test_messages_and_bytes():
    costs = Costs.parse("F=1,B=2,W=1,message_bytes=100")
    table = build("1f1b", stages=4, microbatches=8)
    free, lockstep = simulate(table, costs), simulate(table, costs, lockstep=True)
    assert free.num_messages == lockstep.num_messages == 2 * 3 * 8
    assert free.bytes_per_device == (800, 1600, 1600, 800)
    assert lockstep.permutes == 2 * (8 + 2), "F travels in ticks 0 to 9, B in ticks 3 to 12"
    assert lockstep.bytes_per_device == (1000, 2000, 2000, 1000), "a rank sends in every permute it takes part in"
    assert simulate(build("zb_v", stages=4, microbatches=8), costs).num_messages == 2 * 2 * 3 * 8, "the turn is free"


def test_lockstep_is_never_faster_than_free_running_in_the_same_order():
    numbers = random.Random(1)
    for schedule in ALL:
        table = schedule.build(stages=4, microbatches=8)
        backward = numbers.randint(4, 9)
        costs = Costs(forward=numbers.randint(1, 5), backward=backward, weight=numbers.randint(1, 4), link=1)
        assert simulate(table, costs, lockstep=True, form="unit").makespan >= simulate(table, costs).makespan


def test_illegal_tables_and_options_are_refused():
    with pytest.raises(ShardingError, match="is not legal"):
        simulate(Table.parse("F0"))
    with pytest.raises(ShardingError, match="idle='maks' is unknown"):
        simulate(Table.parse("F0 B0"), lockstep=True, idle="maks")
    with pytest.raises(ShardingError, match="tick form 'units' is unknown"):
        simulate(Table.parse("F0 B0"), lockstep=True, form="units")
