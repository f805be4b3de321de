import pytest

from meshes.errors import ShardingError
from shardlib.cost.collectives import KINDS, ring_bytes


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-gather", 768.0),
        ("reduce-scatter", 768.0),
        ("all-reduce", 1536.0),
        ("all-to-all", 768.0),
        ("ragged-all-to-all", 768.0),
        ("collective-permute", 1024.0),
        ("collective-broadcast", 1024.0),
    ],
)
def test_ring_bytes_of_1024_bytes_over_4_devices(kind: str, expected: float):
    assert ring_bytes(kind, buffer_bytes=1024, group_size=4) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_moves_nothing(kind: str):
    assert ring_bytes(kind, buffer_bytes=1024, group_size=1) == 0


def test_all_reduce_is_reduce_scatter_plus_all_gather():
    for size in (2, 3, 8, 512):
        both = [ring_bytes(kind, buffer_bytes=512 * 3, group_size=size) for kind in ("reduce-scatter", "all-gather")]
        assert ring_bytes("all-reduce", buffer_bytes=512 * 3, group_size=size) == sum(both)


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(ShardingError, match=r"'all-gathr' is not a collective \(did you mean 'all-gather'\?\)"):
        ring_bytes("all-gathr", buffer_bytes=1, group_size=2)


@pytest.mark.parametrize(("buffer_bytes", "group_size"), [(-1, 2), (1, 0)])
def test_impossible_sizes_are_errors(buffer_bytes: int, group_size: int):
    with pytest.raises(ShardingError, match="sizes cannot be negative or empty"):
        ring_bytes("all-reduce", buffer_bytes=buffer_bytes, group_size=group_size)
