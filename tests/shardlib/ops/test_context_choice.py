"""Which kind is chosen, and why in words; the byte formulas are held to compiled programs in test_context_programs."""

from typing import Any

import pytest

from meshes.errors import ShardingError
from shardlib.ops.context_choice import Candidate, Choice, choose, ring_sent

LAYER: dict[str, Any] = {"length": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 1, "causal": True}


def chosen(change: dict[str, Any], **options: Any) -> Choice:
    """The choice for the layer with some sizes changed."""
    return choose(**(LAYER | change | options))


def test_a_slow_link_and_many_kv_heads_take_all_to_all():
    found = chosen({"kv_heads": 32}, context=8)
    assert (found.kind, found.placement) == ("all_to_all", "contiguous")
    assert found.reason.splitlines() == [
        "all_to_all (contiguous): sends 56 MiB per layer and device, holds 16 MiB",
        "ring (zigzag): sends 448 MiB per layer and device, 45 MiB of it behind computation, holds 16 MiB",
        "gather (zigzag): sends 336 MiB per layer and device, holds 128 MiB; "
        "refused: all keys and values are 8 times a device's queries and results",
    ]


def test_a_long_sequence_hides_the_ring():
    found = chosen({"length": 131072}, context=8)
    assert (found.kind, found.placement) == ("ring", "zigzag")
    assert found.candidates[0].exposed_bytes == 0


def test_one_kv_head_is_gathered_where_nothing_hides():
    found = chosen({"kv_heads": 1, "length": 1024}, context=16, flops_per_byte=1e9)
    assert found.kind == "gather"


def test_no_ring_in_a_branch():
    """The ring would win; all-to-all comes next; where heads do not divide, gather whatever it holds."""
    long = {"length": 131072}
    found = chosen(long, context=8, in_branch=True)
    assert found.kind == "all_to_all"
    assert "refused: a permute under a condition that differs between devices deadlocks" in found.reason
    assert chosen(long, context=8, tensor=8, in_branch=True).kind == "gather"
    assert chosen(long, context=8, tensor=8).kind == "ring"


def test_heads_that_do_not_divide_leave_the_ring():
    found = chosen({"kv_heads": 32}, context=8, tensor=8)
    assert found.kind == "ring"
    assert "refused: 4 query heads on a device do not divide over 8 shards" in found.reason


@pytest.mark.parametrize(
    "length, window, causal, placement",
    [
        (8192, None, True, "zigzag"),
        (8200, None, True, "striped"),
        (8192, 512, True, "contiguous"),
        (8192, None, False, "contiguous"),
    ],
)
def test_placements(length, window, causal, placement):
    found = chosen({"length": length, "causal": causal}, window=window, context=8)
    (ring,) = (candidate for candidate in found.candidates if candidate.kind == "ring")
    assert isinstance(ring, Candidate)
    assert ring.placement == placement


def test_a_window_sends_less():
    hops = {"context": 8, "length": 8192, "batch": 1, "kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
    whole, near = (ring_sent(hops=count, **hops)[0] for count in (7, 1))
    assert whole == 7 * near == 2 * 7 / 8 * 2 * 8192 * 8 * 128
    found = chosen({}, context=8, window=512)
    assert found.kind == "ring"
    assert found.candidates[0].forward_bytes == near


@pytest.mark.parametrize(
    "change, message",
    [
        ({"length": 8195}, "length 8195 is not divisible by context=8: pad to 8200"),
        ({"kv_heads": 6}, "32 query heads must be a multiple of 6 KV heads and divide over tensor=1"),
    ],
)
def test_sizes_that_no_kind_fits(change, message):
    with pytest.raises(ShardingError) as caught:
        chosen(change, context=8)
    assert str(caught.value) == f"no context-parallel attention fits:\n- {message}"
