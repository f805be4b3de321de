"""The contract every schedule of the catalogue keeps, and the formulas that say how good each is."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.errors import ShardingError
from shardlib.pipeline.costs import Costs
from shardlib.pipeline.schedules import ALL, Size, build, named
from shardlib.pipeline.simulate import simulate
from shardlib.pipeline.verify import verify

NAMES = [schedule.name for schedule in ALL]
SMALL_SIZES = [(p, m) for p in (1, 2, 3, 4, 6, 7, 8, 12) for m in (1, 2, 3, 4, 8, 12, 24)]


def defined_sizes(schedule, sizes):
    for stages, microbatches in sizes:
        for chunks in range(1, 5):
            if schedule.why_not(stages=stages, chunks=chunks, microbatches=microbatches) is None:
                yield Size(stages=stages, chunks=chunks, microbatches=microbatches)


def build_size(schedule, size):
    return schedule.build(stages=size.stages, chunks=size.chunks, microbatches=size.microbatches)


def check_figures(schedule, size):
    """Bubble and peak as the textbook has them, exact or bounded as the schedule says."""
    simulation = simulate(build_size(schedule, size))
    bubble = simulation.span_bubble_fraction if schedule.on_span else simulation.bubble_fraction
    wanted, peak = float(schedule.bubble(size)), float(schedule.peak(size))
    if size.microbatches < schedule.exact_from(size):
        assert max(simulation.peak_activations) <= peak, size
    else:
        assert bubble <= wanted if schedule.bound else bubble == wanted, (size, bubble, wanted)
        assert max(simulation.peak_activations) == peak, size


def test_the_catalogue():
    assert NAMES == ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"]
    for schedule in ALL:
        assert schedule.source.startswith("arXiv ")
        assert build(schedule.name, stages=4, microbatches=8).name == schedule.name


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ALL), st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_every_schedule_verifies_where_it_is_defined_and_says_why_elsewhere(schedule, stages, microbatches, chunks):
    if schedule.why_not(stages=stages, chunks=chunks, microbatches=microbatches) is None:
        table = schedule.build(stages=stages, chunks=chunks, microbatches=microbatches)
        verify(table, stages=stages, microbatches=microbatches)
        assert (table.num_ranks, table.num_chunks, table.num_microbatches) == (stages, chunks, microbatches)
    else:
        with pytest.raises(ShardingError, match=f"schedule '{schedule.name}' is not defined here: .*\n  fix: "):
            schedule.build(stages=stages, chunks=chunks, microbatches=microbatches)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ALL, ids=NAMES)
def test_every_schedule_verifies_and_keeps_its_figures_at_all_sizes(schedule):
    sizes = [(stages, microbatches) for stages in range(1, 17) for microbatches in range(1, 65)]
    for size in defined_sizes(schedule, sizes):
        verify(build_size(schedule, size), stages=size.stages, microbatches=size.microbatches)
        check_figures(schedule, size)


@pytest.mark.parametrize("schedule", ALL, ids=NAMES)
def test_bubble_and_peak_are_the_textbooks(schedule):
    for size in defined_sizes(schedule, SMALL_SIZES):
        check_figures(schedule, size)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("costs", ["F=1,B=2,W=1", "F=3,B=5,W=2", "F=2,B=2,W=0.5", "F=1,B=7,W=3"])
def test_whole_backward_bubbles_hold_for_any_costs(name, costs):
    schedule = named(name)
    for size in defined_sizes(schedule, SMALL_SIZES):
        if size.microbatches >= schedule.exact_from(size):
            found = simulate(build_size(schedule, size), Costs.parse(costs)).bubble_fraction
            assert found == float(schedule.bubble(size)), size


@pytest.mark.parametrize(("forward", "backward", "weight"), [(1, 2, 1), (2, 4, 2), (3, 6, 2), (4, 8, 3), (5, 10, 4)])
def test_zb_h1_and_h2_bubbles_hold_where_weight_gradients_are_shorter(forward, backward, weight):
    costs = Costs(forward=forward, backward=backward, weight=weight)
    for name, share in (("zb_h1", 1), ("zb_h2", 2)):
        for stages in (2, 3, 4, 8):
            microbatches = 4 * stages
            simulation = simulate(build(name, stages=stages, microbatches=microbatches), costs)
            idle = (stages - 1) * (backward - share * weight + forward - weight)
            total = microbatches * (forward + backward)
            found = simulation.span_bubble_fraction if name == "zb_h2" else simulation.bubble_fraction
            assert found == float(Fraction(idle, idle + total)), (name, stages)


def test_zb_h1_idles_a_third_of_1f1b():
    for stages, microbatches in ((2, 4), (4, 8), (8, 32), (16, 64)):
        ours, theirs = (simulate(build(name, stages=stages, microbatches=microbatches)) for name in ("zb_h1", "1f1b"))
        assert [3 * idle for idle in ours.idle_time] == list(theirs.idle_time)


def test_zb_v_has_the_least_bubble_possible():
    simulation = simulate(build("zb_v", stages=8, microbatches=32))
    assert simulation.bubble_fraction == float(Fraction(7, 199)) <= 0.036
    assert simulation.span_bubble_fraction == 0


def test_v_half_and_v_min_shrink_as_one_over_m():
    for name, share in (("v_half", Fraction(1, 2)), ("v_min", Fraction(2, 3))):
        for stages in (2, 4, 8, 16):
            previous = None
            for microbatches in (2 * stages, 4 * stages, 8 * stages):
                simulation = simulate(build(name, stages=stages, microbatches=microbatches))
                assert simulation.bubble_fraction <= share * stages / microbatches
                idle = simulation.makespan - simulation.work[0]
                assert previous is None or idle == previous, "idle time does not grow with the microbatches"
                previous = idle


def test_interleaved_follows_megatron():
    """Megatron-LM's warm-up at p=4, v=2: (p-1-r)*2 + (v-1)*p forwards, groups of p through one chunk after another."""
    rows = build("interleaved_1f1b", stages=4, chunks=2, microbatches=8).rows
    first = " ".join(str(cell) for cell in rows[0][:13])
    assert first == "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7"
    warm_ups = [next(number for number, cell in enumerate(row) if cell.kind == "B") - 1 for row in rows]
    assert warm_ups == [10, 8, 6, 4]


def test_bad_sizes_get_the_nearest_good_one():
    with pytest.raises(ShardingError) as error:
        build("interleaved_1f1b", stages=4, chunks=2, microbatches=6)
    assert str(error.value) == (
        "schedule 'interleaved_1f1b' is not defined here: stages=4 does not divide microbatches=6\n"
        "  fix: interleaved_1f1b with stages=4, chunks=2, microbatches=8"
    )
    with pytest.raises(ShardingError, match="chunks=3: it has 2 per rank"):
        build("zb_v", stages=4, chunks=3, microbatches=8)
    with pytest.raises(ShardingError, match="microbatches=0 must be at least 1"):
        build("1f1b", stages=4, microbatches=0)
    with pytest.raises(ShardingError, match=r"schedule 'zbh1' is unknown \(did you mean 'zb_h1'\?\)"):
        build("zbh1", stages=4, microbatches=8)
