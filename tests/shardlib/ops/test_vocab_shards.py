"""Which axes a split vocabulary takes, what it opens, and what it refuses."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshes import ShardingError, make_mesh
from shardlib.ops.chunks import over_chunks
from shardlib.ops.vocab_shards import Shards, check_sizes, find_shards, padded_vocab


def inside(region_mesh, manual, **options):
    """What `find_shards` says in a region manual over some axes."""
    found = []

    def region(x):
        found.append(find_shards(**options))
        return x

    jax.eval_shape(
        jax.shard_map(region, mesh=region_mesh, axis_names=manual, in_specs=P(), out_specs=P(), check_vma=False),
        jnp.zeros(8),
    )
    return found[0]


def test_no_mesh_splits_nothing():
    assert find_shards("tensor") == Shards()
    assert Shards().num == 1 and Shards().vocab_spec(2, 0) == P(None, None)


def test_automatic_axes_are_opened():
    shards = find_shards("tensor", mesh=make_mesh("data=2,tensor=4"))
    assert (shards.vocab, shards.batch, shards.length) == (("tensor",), ("data",), ())
    assert set(shards.opened) == {"tensor", "data"} and (shards.num, shards.num_outside) == (4, 1)
    assert shards.vocab_spec(2, 1) == P(None, "tensor") and shards.token_spec(3, first=1) == P(None, "data", None)
    assert shards.gradient_spec(2, 1) == P("data", None, "tensor")
    shards = find_shards("tensor", mesh=make_mesh("data=2,fsdp=2,context=2"))
    assert shards.vocab == () and shards.token_spec(2) == P(("data", "fsdp"), "context")
    with jax.set_mesh(make_mesh("tensor=8")):
        assert find_shards("tensor").num == 8


def test_manual_axes_are_the_regions():
    mesh = make_mesh("stage=2,data=2,tensor=2")
    shards = inside(mesh, {"stage", "data"}, axes=("stage", "tensor"))
    assert shards.vocab == ("stage", "tensor") and shards.opened == ("tensor",)
    assert (shards.num, shards.num_outside) == (4, 2) and shards.vocab_spec(2, 0) == P("tensor", None)
    shards = inside(mesh, {"stage", "data", "tensor"}, axes="tensor", mesh=mesh)
    assert shards.opened == () and shards.mesh is None and shards.num_outside == 2


def test_an_axis_splits_the_vocabulary_or_the_tokens():
    shards = find_shards(("tensor", "fsdp"), mesh=make_mesh("data=2,fsdp=2,tensor=2"))
    assert shards.vocab == ("tensor", "fsdp") and shards.batch == ("data",)


def test_axes_that_cannot_be_meant_are_named():
    with pytest.raises(ShardingError, match=r"no axis 'tensr' in the mesh data=2,tensor=4 \(did you mean 'tensor'\?\)"):
        find_shards("tensr", mesh=make_mesh("data=2,tensor=4"))
    with pytest.raises(ShardingError, match="axis 'tensor' is named twice"):
        find_shards(("tensor", "tensor"), mesh=make_mesh("tensor=4"))
    with pytest.raises(ShardingError, match="axis 'tensor' is Explicit; fix: make the mesh with axis_types="):
        find_shards("tensor", mesh=make_mesh("tensor=4", axis_type=AxisType.Explicit))


def test_sizes_that_cannot_be_split_are_all_named():
    shards = find_shards("tensor", mesh=make_mesh("data=2,tensor=4"))
    with pytest.raises(ShardingError) as caught:
        check_sizes(shards, parameter="head", stored=50257, vocab=50257, tokens=(3, 8))
    text = str(caught.value)
    assert "head: vocab dim of size 50257 not divisible by tensor=4; fix: store padded_vocab(50257, shards=4)" in text
    assert "= 50260 rows and pass vocab=50257" in text
    assert "tokens: batch dim of size 3 not divisible by data=2; fix: pad it, or pass batch_axes=()" in text
    check_sizes(shards, parameter="head", stored=50260, vocab=50257, tokens=(4, 8))


@pytest.mark.parametrize(
    ("vocab", "shards", "multiple", "size"),
    [(50257, 4, 1, 50260), (50257, 8, 128, 50304), (12, 4, 3, 12), (1, 8, 1, 8)],
)
def test_padded_sizes(vocab, shards, multiple, size):
    assert padded_vocab(vocab, shards=shards, multiple=multiple) == size


@pytest.mark.parametrize("num_chunks", [1, 3, 4, 10, 100])
def test_chunks_cover_the_length_once(num_chunks):
    x = jnp.arange(20.0).reshape(2, 10)
    sizes = []

    def double(total, x):
        sizes.append(x.shape)
        return total + x.sum(), (2 * x, x[..., None] + jnp.zeros((1, 1, 3)))

    total, (doubled, wide) = over_chunks(double, jnp.zeros(()), (x,), num_chunks=num_chunks)
    assert total == x.sum() and (doubled == 2 * x).all() and wide.shape == (2, 10, 3) and (wide[..., 0] == x).all()
    assert all(size == (2, -(-10 // num_chunks)) for size in sizes)
