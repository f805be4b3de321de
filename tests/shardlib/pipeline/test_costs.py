"""Costs: text, spreading over chunks and stages, exactness."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshes.errors import ShardingError
from shardlib.pipeline.costs import Costs
from shardlib.pipeline.placement import Placement


def times(text, placement):
    found = Costs.parse(text).times(placement)
    per_kind = (found.forward, found.input, found.weight)
    return [tuple(Fraction(number, found.scale) for number in kind) for kind in per_kind]


def test_a_number_is_a_whole_rank_spread_over_its_chunks():
    forward, input_part, weight = times("F=1,B=2.5,W=1", Placement.v_shape(2))
    assert forward == (Fraction(1, 2),) * 4
    assert input_part == (Fraction(3, 4),) * 4
    assert weight == (Fraction(1, 2),) * 4


def test_lists_are_per_rank_or_per_virtual_stage():
    assert times("F=2:4", Placement.v_shape(2))[0] == (1, 2, 2, 1)
    assert times("F=2:4:6:8", Placement.v_shape(2))[0] == (2, 4, 6, 8)
    with pytest.raises(ShardingError, match="forward has 3 numbers for 2 ranks or 4 virtual stages"):
        times("F=1:1:1", Placement.v_shape(2))


def test_embedding_and_head_are_extra_work_in_proportion_or_as_given():
    forward, input_part, weight = times("F=1,B=2,W=1,head=0.5", Placement.loop(3))
    assert (forward, input_part, weight) == ((1, 1, Fraction(3, 2)),) * 3
    forward, input_part, weight = times("F=1,B=2,W=1,embedding=0.25:0.5:0.5", Placement.loop(2))
    assert (forward, input_part, weight) == ((Fraction(5, 4), 1), (1, 1), (Fraction(3, 2), 1))
    assert times("F=1,B=3,W=1,embedding=1,head=1", Placement.loop(1)) == [(3,), (6,), (3,)]


@given(st.lists(st.decimals(0, 100, places=3, allow_nan=False), min_size=4, max_size=4))
def test_text_round_trips(numbers):
    forward, input_part, weight, link = numbers
    text = f"F={forward + 1},B={input_part + weight},W={weight},link={link}"
    costs = Costs.parse(text)
    assert Costs.parse(str(costs)).times(Placement.loop(2)) == costs.times(Placement.loop(2))


def test_floats_mean_the_decimal_they_print_as():
    assert Costs(forward=0.1).times(Placement.loop(1)).scale == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F=1,Q=2", "cost 'Q' is unknown; known are F, B, W, link"),
        ("F=1,hed=2", "(did you mean 'head'?)"),
        ("F=x", "'x' is not a number\n  F=x\n  ^^^\n  fix: F=1, or one number per stage"),
        ("F=1,F=2", "cost 'F' appears twice\n  F=1,F=2\n      ^^^"),
        ("F=0", "the forward cost F must be above 0"),
        ("F=1,B=1,W=2", "W=2 is above B=1\n  fix: B is the whole backward"),
        ("F=-1", "cost forward=-1 must be 0, or from 1e-09 to 1e+12"),
        ("F=1e400", "cost forward=a number above 1e308 must be 0, or"),
        ("B=1e-300", "cost backward=1e-300 must be 0, or"),
        ("F=1/0", "is not a number"),
        ("F=nan", "is not a number"),
        ("link=1:2", "link takes one number"),
        ("", "cost '' is unknown"),
        ("head=1:2", "head takes one number or three"),
    ],
)
def test_bad_text_is_pointed_at(text, message):
    with pytest.raises(ShardingError) as error:
        Costs.parse(text)
    assert message in str(error.value)
