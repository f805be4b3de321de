"""Mesh text: round trip, inference, and errors that point at the wrong character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshes.errors import ShardingError
from meshes.shape import STANDARD_AXES, MeshShape

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
SHAPES = st.dictionaries(NAMES, st.integers(1, 32), min_size=1, max_size=4).map(
    lambda sizes: MeshShape(axes=tuple(sizes.items()))
)


@pytest.mark.newest
@given(SHAPES)
def test_text_round_trips(shape):
    assert MeshShape.parse(str(shape)) == shape
    assert MeshShape.parse(f" {shape} ".replace("=", " = ").replace(",", " ,\t")) == shape
    assert MeshShape.parse(dict(shape.axes)) == shape
    assert MeshShape.parse(shape) is shape


@given(SHAPES, st.integers(1, 8), st.data())
def test_the_left_over_axis_is_inferred(shape, size, data):
    at = data.draw(st.integers(0, len(shape.axes)))
    open_shape = MeshShape(axes=(*shape.axes[:at], ("left_over", -1), *shape.axes[at:]))
    inferred = open_shape.infer(shape.num_devices * size)
    assert inferred.size("left_over") == size
    assert inferred.num_devices == shape.num_devices * size
    assert inferred.infer(7) is inferred


@given(st.text(max_size=40) | st.text(alphabet="data=tensor,-0123456789_ \t", max_size=24))
def test_any_text_parses_or_raises_only_our_error(text):
    try:
        shape = MeshShape.parse(text)
    except ShardingError as error:
        assert "fix:" in str(error) or "limit" in str(error)
    else:
        assert MeshShape.parse(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "pointed", "says"),
    [
        ("data=2,tensor=x", "x", "'x' is not a size of axis 'tensor'"),
        ("data=2,tensor=4x", "x", "is not a size of axis 'tensor'"),
        ("data=2,tensor", "", "axis 'tensor' has no size"),
        ("data=2,ten-sor=4", "-", "is not an axis name"),
        ("data=0", "0", "size 0 of axis 'data' is not positive"),
        ("data=-2", "-2", "size -2 of axis 'data' is not positive"),
        ("data=2,,tensor=4", ",", "an axis is missing"),
        ("data=2, data=4", "data", "axis 'data' appears twice"),
        ("data=-1,tensor=-1", "-1", "only one axis may be -1"),
        ("data=2 tensor=4", " ", "is not a size of axis 'data'"),
        ("1data=2", "1", "is not an axis name"),
    ],
)
def test_the_caret_is_under_the_wrong_character(text, pointed, says):
    with pytest.raises(ShardingError) as caught:
        MeshShape.parse(text)
    lines = str(caught.value).splitlines()
    assert says in lines[0]
    assert lines[1] == f"  {text}"
    start, length = lines[2].index("^") - 2, lines[2].count("^")
    assert text[start : start + max(length, len(pointed))].startswith(pointed)
    # Where the same text occurs twice, it is the second that is wrong.
    assert start == (text.rindex(pointed) if pointed and pointed != "," else start)
    assert lines[3].startswith("  fix: ")


def test_an_empty_mesh_says_what_to_write():
    for text in ("", "   "):
        with pytest.raises(ShardingError, match=r'the mesh has no axes\n  fix: name at least one, such as "data=1"'):
            MeshShape.parse(text)


def test_no_mesh_of_absurd_size():
    with pytest.raises(ShardingError, match="above the limit"):
        MeshShape.parse("data=99999999,tensor=99999999")


@pytest.mark.parametrize("value", [None, 8, ["data=2"], b"data=2"])
def test_other_types_are_refused(value):
    with pytest.raises(ShardingError, match="a mesh is text such as"):
        MeshShape.parse(value)


@pytest.mark.parametrize("axes", [(("data", 2.0),), (("data", True),), (("data", "2"),), ((3, 2),), (("", 2),)])
def test_values_built_by_hand_are_validated(axes):
    with pytest.raises(ShardingError, match="is not"):
        MeshShape(axes=axes)


def test_inference_names_what_does_not_divide():
    with pytest.raises(ShardingError, match="8 devices are not a multiple of the 3 that the other axes take"):
        MeshShape.parse("data=-1,tensor=3").infer(8)


def test_a_missing_axis_has_size_one_and_one_is_legal():
    shape = MeshShape.parse("data=1")
    assert (shape.size("data"), shape.size("tensor"), shape.num_devices) == (1, 1, 1)
    assert len(set(STANDARD_AXES)) == len(STANDARD_AXES)
