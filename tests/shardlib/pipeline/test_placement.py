"""Which rank holds what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshes.errors import ShardingError
from shardlib.pipeline.placement import Placement


def test_loop_and_v():
    assert Placement.loop(3, chunks=2).ranks == (0, 1, 2, 0, 1, 2)
    assert Placement.v_shape(3).ranks == (0, 1, 2, 2, 1, 0)
    assert Placement.v_shape(2, chunks=3).ranks == (0, 1, 1, 0, 0, 1)


@given(st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_lookups_are_inverse_and_text_round_trips(stages, chunks, loop):
    placement = (Placement.loop if loop else Placement.v_shape)(stages, chunks=chunks)
    assert (placement.num_ranks, placement.num_chunks) == (stages, chunks)
    for stage, rank in enumerate(placement.ranks):
        assert placement.stage(rank, chunk=placement.chunk(stage)) == stage
    assert Placement.parse(str(placement), stages=stages, chunks=chunks) == placement


@given(st.permutations([0, 0, 1, 1, 2, 2]))
def test_any_even_placement_has_a_text(ranks):
    placement = Placement(ranks=tuple(ranks))
    assert Placement.parse(str(placement), stages=3, chunks=2) == placement


@pytest.mark.parametrize("ranks", [(), (0, 0, 1), (0, 2), (-1, 0)])
def test_uneven_placements_are_refused(ranks):
    with pytest.raises(ShardingError):
        Placement(ranks=ranks)
