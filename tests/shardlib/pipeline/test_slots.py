"""Slots: disjoint lifetimes, and no more slots than values that live at once."""

from hypothesis import given
from hypothesis import strategies as st

from shardlib.pipeline.slots import assign_slots, most_alive

lifetimes = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=40).map(
    lambda spans: {number: (first, first + length) for number, (first, length) in enumerate(spans)}
)


@given(lifetimes)
def test_values_that_live_together_never_share_a_slot(values):
    slots = assign_slots(values)
    for one, (first, last) in values.items():
        for other, (begin, end) in values.items():
            if one < other and first <= end and begin <= last:
                assert slots[one] != slots[other]


@given(lifetimes)
def test_as_few_slots_as_values_ever_live_at_once(values):
    counts = [sum(first <= tick <= last for first, last in values.values()) for tick in range(45)]
    assert most_alive(values) == max(counts) == len(set(assign_slots(values).values()))
