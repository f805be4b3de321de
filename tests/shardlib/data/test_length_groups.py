"""Groups by length: the best there are on few sequences, no worse than equal groups on many, in milliseconds."""

import itertools
import time

import numpy as np
import pytest

from meshes.errors import ShardingError
from shardlib.data.group_layout import Programs, arrange
from shardlib.data.length_groups import Costs, Group, Grouping, equal_groups, plan_groups
from shardlib.ops.ring_groups import group_ranks, ring_pairs

COSTS = Costs(pair_seconds=1.0, token_seconds=300.0, sent_token_seconds=200.0, hop_seconds=20000.0)
FREE_TRANSFERS = Costs(pair_seconds=1.0, token_seconds=300.0)
DEAR_TRANSFERS = Costs(pair_seconds=0.1, token_seconds=1.0, sent_token_seconds=20.0, hop_seconds=300.0)


def partitions(items):
    """All partitions of a list into sets."""
    if not items:
        yield []
        return
    first, *rest = items
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            remaining = [item for item in rest if item not in others]
            for partition in partitions(remaining):
                yield [[first, *others], *partition]


def brute_force(lengths, *, ranks, tokens_per_rank, costs):
    """The least time of the slowest group over all sets and all degrees."""

    def seconds(sequences, degree):
        sizes = [lengths[i] for i in sequences]
        if sum(sizes) > degree * tokens_per_rank:
            return float("inf")
        pairs = sum(n * (n + 1) / 2 for n in sizes)
        compute = (costs.pair_seconds * pairs + costs.token_seconds * sum(sizes)) / degree
        sent = costs.sent_token_seconds * sum(sizes) * (degree - 1) / degree
        return compute + sent + costs.hop_seconds * (degree - 1)

    best = float("inf")
    for sets in partitions(list(range(len(lengths)))):
        for degrees in itertools.product(range(1, ranks + 1), repeat=len(sets)):
            if sum(degrees) <= ranks:
                best = min(best, max(map(seconds, sets, degrees)))
    return best


def heavy_tailed(seed, count, *, most=4000):
    """Lengths of which a few are long."""
    return np.clip(np.random.RandomState(seed).lognormal(5.5, 1.3, count), 8, most).astype(int).tolist()


def check(grouping, lengths, *, ranks, tokens_per_rank):
    assert sum(grouping.degrees) == ranks
    assert list(grouping.degrees) == sorted(grouping.degrees, reverse=True)
    assert sorted(i for group in grouping.groups for i in group.sequences) == list(range(len(lengths)))
    for group in grouping.groups:
        assert sum(lengths[i] for i in group.sequences) <= group.degree * tokens_per_rank


@pytest.mark.parametrize("costs", [COSTS, FREE_TRANSFERS, DEAR_TRANSFERS])
def test_few_sequences_get_the_best_groups(costs):
    for seed, count in enumerate([1, 2, 3, 4, 4]):
        lengths = heavy_tailed(seed, count)
        sizes = {"ranks": 6, "tokens_per_rank": -(-sum(lengths) // 6) + 100 * seed}
        found = plan_groups(lengths, **sizes, costs=costs)
        check(found, lengths, **sizes)
        assert found.seconds == pytest.approx(brute_force(lengths, **sizes, costs=costs), rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_six_sequences_get_the_best_groups(seed):
    lengths = heavy_tailed(seed, 6)
    sizes = {"ranks": 8, "tokens_per_rank": -(-sum(lengths) // 8) + 37 * seed}
    for costs in (COSTS, FREE_TRANSFERS, DEAR_TRANSFERS):
        found = plan_groups(lengths, **sizes, costs=costs)
        assert found.seconds == pytest.approx(brute_force(lengths, **sizes, costs=costs), rel=1e-6)


def test_the_seconds_of_a_grouping_are_those_of_its_slowest_group():
    lengths = heavy_tailed(3, 20)
    found = plan_groups(lengths, ranks=8, tokens_per_rank=4000, costs=COSTS)
    each = [
        COSTS.seconds(COSTS.load(lengths[i] for i in group.sequences), group.degree)
        for group in found.groups
        if group.sequences
    ]
    assert found.seconds == pytest.approx(max(each))


def static(lengths, *, ranks, tokens_per_rank, costs):
    """The best of equal groups of 1, 2, 4, ... ranks."""
    found = []
    for degree in (1, 2, 4, 8):
        try:
            grouping = equal_groups(lengths, degree=degree, ranks=ranks, tokens_per_rank=tokens_per_rank, costs=costs)
        except ShardingError:
            continue
        found.append(grouping.seconds)
    return min(found)


def test_many_sequences_are_never_slower_than_equal_groups_and_often_faster():
    gains = []
    for seed in range(100):
        lengths = heavy_tailed(seed, 24)
        sizes = {"ranks": 8, "tokens_per_rank": max(1500, sum(lengths) // 6)}
        found = plan_groups(lengths, **sizes, costs=COSTS)
        check(found, lengths, **sizes)
        gains.append(static(lengths, **sizes, costs=COSTS) / found.seconds)
    assert min(gains) >= 1 - 1e-9
    assert np.mean(gains) > 1.1, np.mean(gains)


def test_a_plan_takes_milliseconds():
    """CPU time, the fastest of five: other programs run on this machine too."""
    for count in (6, 24, 64):
        lengths = heavy_tailed(count, count)
        taken = []
        for _ in range(5):
            start = time.process_time()
            plan_groups(lengths, ranks=8, tokens_per_rank=max(1500, sum(lengths) // 6), costs=COSTS)
            taken.append(time.process_time() - start)
        assert min(taken) < 0.010, (count, min(taken))


def test_a_long_sequence_takes_the_ranks_the_short_ones_leave():
    found = plan_groups([600, 100, 100], ranks=8, tokens_per_rank=100, costs=COSTS)
    assert found.degrees == (6, 2)
    assert found.groups == (Group(degree=6, sequences=(0,)), Group(degree=2, sequences=(1, 2)))


def test_memory_decides_where_work_would_not():
    lengths, sizes = [400, 50], {"ranks": 8, "costs": DEAR_TRANSFERS}
    assert plan_groups(lengths, tokens_per_rank=400, **sizes).groups[0].degree == 1
    assert plan_groups(lengths, tokens_per_rank=100, **sizes).groups[0] == Group(degree=4, sequences=(0,))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lengths": [500, 400]}, "900 tokens exceed the 800 that 8 ranks of 100 hold; fix: tokens_per_rank=113"),
        ({"lengths": []}, "there are no sequences"),
        ({"lengths": [5, 0]}, "sequence 1 has length 0"),
        ({"lengths": [5], "ranks": 0}, "ranks=0 is not positive"),
    ],
)
def test_errors(arguments, says):
    with pytest.raises(ShardingError) as caught:
        plan_groups(**{"ranks": 8, "tokens_per_rank": 100, "costs": COSTS, **arguments})
    assert says in str(caught.value)


def test_costs_are_times():
    with pytest.raises(ShardingError, match="token_seconds=-1 is no time"):
        Costs(pair_seconds=1, token_seconds=-1)


def test_equal_groups_that_do_not_fit():
    with pytest.raises(ShardingError, match="fix: use plan_groups"):
        equal_groups([300, 10], degree=2, ranks=8, tokens_per_rank=100, costs=COSTS)


def test_rings_of_unequal_sizes():
    assert group_ranks((3, 2, 1)) == [[0, 1, 2], [3, 4], [5]]
    assert ring_pairs((3, 2, 1)) == [(0, 1), (1, 2), (2, 0), (3, 4), (4, 3), (5, 5)]


@pytest.mark.parametrize("placement", ["contiguous", "striped"])
def test_a_batch_lies_on_its_groups(placement):
    documents = [np.arange(10, 13), np.arange(20, 27), np.arange(30, 32)]
    groups = (Group(degree=2, sequences=(1,)), Group(degree=1, sequences=(0,)), Group(degree=1, sequences=(2,)))
    batch = arrange(documents, Grouping(groups=groups, seconds=0.0), tokens_per_rank=4, placement=placement)
    rows = {name: leaf.reshape(4, 4).tolist() for name, leaf in batch.items()}
    long = [[20, 21, 22, 23], [24, 25, 26, 0]] if placement == "contiguous" else [[20, 22, 24, 26], [21, 23, 25, 0]]
    assert rows["inputs"] == [*long, [10, 11, 12, 0], [30, 31, 0, 0]]
    assert rows["segment_ids"] == [[2, 2, 2, 2], [2, 2, 2, 0], [1, 1, 1, 0], [3, 3, 0, 0]]
    assert rows["targets"][2:] == [[11, 12, 0, 0], [31, 0, 0, 0]]
    assert rows["weights"][2:] == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch["weights"].sum() == sum(len(document) - 1 for document in documents)


def test_a_group_that_does_not_fit():
    grouping = Grouping(groups=(Group(degree=1, sequences=(0,)),), seconds=0.0)
    with pytest.raises(ShardingError, match=r"sequences \[0\] have 5 tokens, and their 1 ranks hold 4"):
        arrange([np.arange(5)], grouping, tokens_per_rank=4)


def test_programs_are_made_once_per_degrees():
    made = []
    programs = Programs(lambda degrees: made.append(degrees) or len(made))
    assert [programs(each) for each in ((5, 3), (3, 5), (4, 4), (5, 3))] == [
        1,
        2,
        3,
        1,
    ]  # by the order in which the rings stand
    assert programs.num_made == 3
    programs = Programs(lambda degrees: made.append(degrees) or len(made))
    made.clear()
    for seed in range(150):
        lengths = heavy_tailed(seed, 12)
        programs(plan_groups(lengths, ranks=8, tokens_per_rank=sum(lengths) // 7, costs=COSTS).degrees)
    assert programs.num_made == len(set(made)) <= 22  # the partitions of 8
