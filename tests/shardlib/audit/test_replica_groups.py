import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib.audit.replica_groups import axes_of_groups, axes_of_pairs, read_groups, read_pairs

CUBE = MeshShape.parse("data=2,fsdp=2,tensor=2")


def as_sets(groups):
    return {frozenset(group) for group in groups}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{3,1}, {2,0}}, use_global_device_ids=true", ((3, 1), (2, 0))),
        ("{}", ()),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1), dimensions={0}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['data'=2,'tensor'=2] {'tensor'}", ((0, 1), (2, 3))),
        ("mesh['data'=2,'tensor'=2] {'data'}", ((0, 2), (1, 3))),
        ("mesh[data=2,tensor=2] {tensor,data}", ((0, 2, 1, 3),)),
        ("mesh['axis_0'=1,'axis_1'=4] {'axis_1'}", ((0, 1, 2, 3),)),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4] {'x','y':(1)2}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'x'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'b':(2)2}", ((0, 1), (4, 5), (2, 3), (6, 7))),
        ("mesh['x'=2] {}", ((0,), (1,))),
    ],
)
def test_the_three_spellings(text: str, expected: tuple):
    assert read_groups(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{{0,1},{2,}}",
        "{{0,1},{1,2}}",
        "{{0,1},{2,3}",
        "{{0,1}}x",
        "[2,4]<=[4]",
        "[2,4]<=[4,2]T(1,1)",
        "[8]<=[8]",
        "[2,99999999]<=[99999999,2]",
        "mesh['x'=2] {'y'}",
        "mesh['x'=2,'x'=2] {'x'}",
        "mesh['x'=4] {'x':(3)2}",
        "mesh['x'=4] {'x':(0)2}",
        "mesh['x'=4] {'x':(4)2}",
        "mesh['x'=4] {'x','x'}",
        "mesh['x'=4], device_ids=(0,1) {'x'}",
        "mesh['x'=] {'x'}",
        "mesh['x'=0] {'x'}",
    ],
)
def test_groups_that_cannot_be_read_are_errors(text: str):
    with pytest.raises(ShardingError, match="replica groups"):
        read_groups(text)


@pytest.mark.parametrize("text", ["{{0,1},{2}}", "{{0,1},{0,2}}", "{{1,0},{2,0}}", "{0,1}", "[2,2]<=[4]", ""])
def test_pairs_that_cannot_be_read_are_errors(text: str):
    with pytest.raises(ShardingError, match="source_target_pairs"):
        read_pairs(text)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_every_subset_of_axes_is_recognised_in_every_spelling(sizes: list[int], data):
    names = [f"a{index}" for index in range(len(sizes))]
    mesh_shape = MeshShape(axes=tuple(zip(names, sizes, strict=True)))
    dims = data.draw(st.permutations([d for d in range(len(sizes)) if data.draw(st.booleans())]))
    rest = [d for d in range(len(sizes)) if d not in dims]
    devices = np.arange(mesh_shape.num_devices).reshape(sizes).transpose(*rest, *dims)
    width = int(np.prod([sizes[d] for d in dims]))
    rows = devices.reshape(-1, width).tolist()
    axes, picked = (",".join(f"'{names[d]}'{tail(d)}" for d in which) for tail, which in [
        (lambda d: f"={sizes[d]}", range(len(sizes))), (lambda d: "", dims)])  # fmt: skip
    order = ",".join(map(str, [*rest, *dims]))
    spellings = [
        "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}",
        f"[{len(rows)},{width}]<=[{','.join(map(str, sizes))}]T({order})",
        f"mesh[{axes}] {{{picked}}}",
    ]
    expected = tuple(name for name, d in zip(names, range(len(sizes)), strict=True) if d in dims and sizes[d] > 1)
    for text in spellings:
        assert read_groups(text) == tuple(map(tuple, rows))
        assert axes_of_groups(read_groups(text), mesh_shape=mesh_shape).axes == expected


@pytest.mark.parametrize("axes", [c for n in (1, 2, 3) for c in itertools.combinations(CUBE.names, n)])
def test_axes_of_groups_on_a_cube(axes: tuple[str, ...]):
    groups = read_groups(f"mesh['data'=2,'fsdp'=2,'tensor'=2] {{{','.join(axes)}}}")
    assert axes_of_groups(groups, mesh_shape=CUBE).axes == axes


def test_part_of_an_axis_is_not_an_axis():
    match = axes_of_groups(((0, 1), (2, 3), (4, 5), (6, 7)), mesh_shape=MeshShape.parse("data=2,tensor=4"))
    assert match.axes is None
    assert match.reason.startswith("group (0, 1) spans tensor, but the groups are not the lines of data=2,tensor=4")


def test_groups_of_another_mesh_are_not_forced_onto_this_one():
    assert axes_of_groups(((0, 3), (1, 2)), mesh_shape=MeshShape.parse("data=2,tensor=2")).axes is None
    match = axes_of_groups(((0, 1), (2, 3)), mesh_shape=CUBE)
    assert (match.axes, match.reason) == (None, "the groups do not cover the 8 devices of data=2,fsdp=2,tensor=2")


def test_single_devices_move_nothing():
    assert axes_of_groups(tuple((device,) for device in range(8)), mesh_shape=CUBE).axes == ()
    assert axes_of_pairs(((3, 3),), mesh_shape=CUBE).axes == ()


def test_axes_of_pairs():
    ring = tuple((rank, (rank + 1) % 4) for rank in range(4))
    assert axes_of_pairs(ring, mesh_shape=MeshShape.parse("stage=4,data=1")).axes == ("stage",)
    assert axes_of_pairs(((0, 3),), mesh_shape=MeshShape.parse("data=2,tensor=2")).axes == ("data", "tensor")
    assert axes_of_pairs(((0, 8),), mesh_shape=CUBE).axes is None


def test_a_mesh_with_permuted_devices_spells_what_numpy_says():
    text = "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}"
    assert as_sets(read_groups(text)) == as_sets(np.arange(8).reshape(4, 2).T.reshape(2, 4).tolist())


def test_large_meshes_are_read_quickly():
    groups = read_groups("mesh['data'=16,'fsdp'=128,'tensor'=8] {'fsdp'}")
    mesh_shape = MeshShape.parse("data=16,fsdp=128,tensor=8")
    assert axes_of_groups(groups, mesh_shape=mesh_shape).axes == ("fsdp",)
