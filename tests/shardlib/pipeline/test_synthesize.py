"""Synthesis: equal to brute force where that is possible, never worse than the catalogue, quick where it is large."""

import random
import subprocess
import sys
import time
from fractions import Fraction

import pytest

from meshes.errors import ShardingError
from shardlib.pipeline.costs import Costs
from shardlib.pipeline.graph import build_graph
from shardlib.pipeline.integer_program import solve
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.retime import retime, split
from shardlib.pipeline.schedules import ALL, build
from shardlib.pipeline.simulate import free_spans, simulate
from shardlib.pipeline.synthesize import synthesize
from shardlib.pipeline.table import Table
from shardlib.pipeline.ticks import live_activations
from shardlib.pipeline.verify import verify


def brute_force(costs, limit, *, stages, microbatches):
    """The least makespan of any order of work with one chunk per rank: every reachable state, none left out.

    A state is what each stage has done, when its rank is free and when the messages it has not used arrive. There
    is no pruning and no bound, so nothing to get wrong.
    """
    forward, input_part, weight = (list(kind) for kind in costs["times"])
    link, stash = costs["link"], costs["stash"]
    layer = {(((0, 0, 0),) * stages, (0,) * stages, ((),) * stages, ((),) * stages)}
    for _ in range(3 * stages * microbatches):
        following = set()
        for counts, free, activations, cotangents in layer:
            for s in range(stages):
                f, i, w = counts[s]
                if f < microbatches and (s == 0 or activations[s]) and f + 1 - i + stash * (i - w) <= limit:
                    end = max(free[s], activations[s][0] if s else 0) + forward[s]
                    waiting = put(activations, s, activations[s][1:])
                    if s < stages - 1:
                        waiting = put(waiting, s + 1, (*waiting[s + 1], end + link))
                    following.add((put(counts, s, (f + 1, i, w)), put(free, s, end), waiting, cotangents))
                if i < f and (s == stages - 1 or cotangents[s]):
                    end = max(free[s], cotangents[s][0] if s < stages - 1 else 0) + input_part[s]
                    waiting = put(cotangents, s, cotangents[s][1:])
                    if s > 0:
                        waiting = put(waiting, s - 1, (*waiting[s - 1], end + link))
                    following.add((put(counts, s, (f, i + 1, w)), put(free, s, end), activations, waiting))
                if w < i:
                    end = free[s] + weight[s]
                    following.add((put(counts, s, (f, i, w + 1)), put(free, s, end), activations, cotangents))
        layer = following
    return min(max(free) for _, free, _, _ in layer)


def put(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


COSTS = (
    {"times": ((1, 1, 1), (1, 1, 1), (1, 1, 1)), "link": 0, "stash": 1},
    {"times": ((3, 4, 3), (5, 4, 4), (2, 3, 2)), "link": 1, "stash": 1},
    {"times": ((2, 2, 5), (2, 2, 6), (1, 1, 3)), "link": 0, "stash": Fraction(1, 2)},
    {"times": ((4, 2, 2), (3, 3, 3), (4, 4, 4)), "link": 2, "stash": Fraction(3, 4)},
)


def check_against_brute_force(costs, *, stages, microbatches, limit):
    costs = costs | {"times": [kind[:stages] for kind in costs["times"]]}
    forward, input_part, weight = costs["times"]
    given = Costs(
        forward=tuple(forward),
        backward=tuple(a + b for a, b in zip(input_part, weight)),
        weight=tuple(weight),
        link=costs["link"],
        stash=costs["stash"],
    )
    best = brute_force(costs, limit, stages=stages, microbatches=microbatches)
    found = synthesize(given, limit, stages=stages, microbatches=microbatches, chunks=1)
    assert found.makespan == best and found.proved
    simulation = simulate(found.table, given)
    assert simulation.makespan == best and max(simulation.peak_activations) <= limit
    assert synthesize(given, limit, stages=stages, microbatches=microbatches, effort=2_000).makespan <= best


@pytest.mark.parametrize("costs", COSTS, ids=range(len(COSTS)))
@pytest.mark.parametrize(
    ("stages", "microbatches", "limit"), [(1, 4, 1), (2, 2, 2), (2, 3, 1), (2, 4, 2), (3, 2, 2), (3, 3, 2), (3, 4, 1)]
)
def test_small_sizes_equal_brute_force(costs, stages, microbatches, limit):
    check_against_brute_force(costs, stages=stages, microbatches=microbatches, limit=limit)


@pytest.mark.exhaustive
@pytest.mark.parametrize("costs", COSTS, ids=range(len(COSTS)))
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_all_small_sizes_equal_brute_force(costs, stages, microbatches, limit):
    check_against_brute_force(costs, stages=stages, microbatches=microbatches, limit=limit)


def test_never_worse_than_the_catalogue_on_200_points():
    numbers = random.Random(0)
    improved = 0
    for _ in range(200):
        stages = numbers.choice((1, 2, 3, 4, 4, 5))
        microbatches = numbers.choice((stages, 2 * stages, numbers.randint(1, 8)))
        weight = numbers.randint(1, 4)
        costs = Costs(
            forward=numbers.randint(2, 4),
            backward=weight + numbers.randint(2, 5),
            weight=weight,
            link=Fraction(numbers.choice((0, 0, 1, 2)), 2),
            head=numbers.choice((0, 0, 1, 2)),
            stash=numbers.choice((1, Fraction(1, 2), Fraction(47, 50))),
        )
        limit = numbers.choice((None, 1, 2, 3, stages, stages + 1, 2 * stages))
        best = best_of_catalogue(costs, limit, stages=stages, microbatches=microbatches)
        found = synthesize(costs, limit, stages=stages, microbatches=microbatches, effort=1_000)
        verify(found.table, stages=stages, microbatches=microbatches, max_activations=None)
        simulation = simulate(found.table, costs)
        assert simulation.makespan == found.makespan
        assert limit is None or max(simulation.peak_activations) <= limit
        assert best is None or found.makespan <= best
        improved += best is None or found.makespan < best
    assert improved >= 30, "and on many points it is better"


def best_of_catalogue(costs, limit, *, stages, microbatches):
    makespans = []
    for schedule in ALL:
        for chunks in range(1, 5):
            if schedule.why_not(stages=stages, chunks=chunks, microbatches=microbatches) is None:
                table = schedule.build(stages=stages, chunks=chunks, microbatches=microbatches)
                simulation = simulate(table, costs)
                if limit is None or max(simulation.peak_activations) <= limit:
                    makespans.append(simulation.makespan)
    return min(makespans, default=None)


def test_16_stages_and_64_microbatches_take_less_than_30_seconds():
    costs = Costs.parse("F=1,B=2.2,W=0.9,link=0.1,head=0.3")
    start = time.process_time()
    found = synthesize(costs, 10, stages=16, microbatches=64)
    assert time.process_time() - start < 30
    assert found.peak_activations <= 10
    assert found.makespan < simulate(build("v_half", stages=16, microbatches=64), costs).makespan


@pytest.mark.parametrize("costs", COSTS, ids=range(len(COSTS)))
@pytest.mark.parametrize(("stages", "microbatches", "limit"), [(2, 3, 2), (3, 3, 2)])
def test_the_integer_program_equals_brute_force(costs, stages, microbatches, limit):
    costs = costs | {"times": [kind[:stages] for kind in costs["times"]]}
    forward, input_part, weight = costs["times"]
    times = Costs(
        forward=tuple(forward),
        backward=tuple(a + b for a, b in zip(input_part, weight)),
        weight=tuple(weight),
        link=costs["link"],
        stash=costs["stash"],
    ).times(Placement.loop(stages))
    best = brute_force(costs, limit, stages=stages, microbatches=microbatches) * times.scale
    solved = solve(
        Placement.loop(stages),
        times,
        microbatches=microbatches,
        limit=limit * times.size_scale,
        known=best + 7,
        seconds=60,
    )
    table = Table(name="solved", placement=Placement.loop(stages), rows=solved.rows or ())
    graph = build_graph(table)
    assert graph.complete and max(end for _, end in free_spans(graph, times)) == best == solved.at_least
    assert (
        max(live_activations(graph, times, order=[list(graph.row(r)) for r in range(stages)]))
        <= limit * times.size_scale
    )
    impossible = solve(
        Placement.loop(stages),
        times,
        microbatches=microbatches,
        limit=limit * times.size_scale,
        known=best - 1,
        seconds=60,
    )
    assert impossible.rows is None and impossible.at_least == best


def test_the_integer_program_proves_what_searching_does_not():
    costs = Costs.parse("F=3,B=7,W=3")
    found = synthesize(costs, 3, stages=4, microbatches=5, chunks=1, effort=3_000)
    proved = synthesize(costs, 3, stages=4, microbatches=5, chunks=1, effort=3_000, prove_seconds=100)
    assert not found.proved and proved.proved and proved.makespan <= found.makespan


def test_without_scipy_searching_works_and_proving_names_the_install_line():
    code = """
import sys
sys.modules["scipy"] = sys.modules["scipy.optimize"] = None
from shardlib.pipeline.synthesize import synthesize
assert synthesize(stages=2, microbatches=3, chunks=1).proved
try:
    synthesize(stages=4, microbatches=6, effort=1000, prove_seconds=1)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "integer programming needs scipy: pip install 'shardlib[planner]'\n"


def test_the_same_question_gets_the_same_answer():
    costs = Costs.parse("F=1,B=2.2,W=0.8,link=0.2,head=0.6")
    one, other = (synthesize(costs, 3, stages=4, microbatches=6, effort=30_000) for _ in range(2))
    assert one == other


def test_a_limit_nothing_fits_names_the_least_that_would():
    with pytest.raises(ShardingError) as error:
        synthesize(max_activations=0.5, stages=4, microbatches=8)
    assert "max_activations=0.5: no schedule of 4 stages fits" in str(error.value)
    assert "fix: max_activations=1 or more" in str(error.value)


def test_retiming_keeps_tables_legal_and_within_the_limit():
    for schedule in ALL:
        for costs in ("F=1,B=2,W=1", "F=2,B=7,W=3,link=1,head=1,stash=0.5"):
            table = split(schedule.build(stages=4, microbatches=8))
            times = Costs.parse(costs).times(table.placement)
            before = max(simulate(table, Costs.parse(costs)).peak_activations)
            for careful in (True, False):
                after = retime(table, times, limit=int(before * times.size_scale), careful=careful)
                verify(after, stages=4, microbatches=8)
                assert max(simulate(after, Costs.parse(costs)).peak_activations) <= before


def test_splitting_a_backward_changes_nothing_but_where_it_can_be_cut():
    table = build("1f1b", stages=4, microbatches=8)
    assert simulate(split(table)).makespan <= simulate(table).makespan
    verify(split(table), stages=4, microbatches=8)
