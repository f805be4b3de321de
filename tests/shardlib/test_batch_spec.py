"""Batches described without arrays."""

import jax.numpy as jnp
import pytest

from meshes import ShardingError
from shardlib.batch_spec import ArraySpec, abstract, resized

SPEC = {"inputs": ArraySpec(shape=(16, 256), dtype="int32", axes=("batch", "length"))}


def test_sizes_change_by_name():
    assert resized(SPEC, batch=32, length=None)["inputs"].shape == (32, 256)
    assert abstract(resized(SPEC, length=8))["inputs"].shape == (16, 8)
    with pytest.raises(ShardingError, match=r"no input has an axis 'lenth' \(did you mean 'length'\?\)"):
        resized(SPEC, lenth=8)
    with pytest.raises(ShardingError, match="batch size 0 is not positive"):
        resized(SPEC, batch=0)


def test_one_name_per_dim():
    with pytest.raises(ShardingError, match=r"an input of shape \(8, 4\) has 1 axis names"):
        ArraySpec(shape=(8, 4), dtype="int32", axes=("batch",))


def test_a_dtype_is_what_jax_makes_of_it():
    assert abstract({"x": ArraySpec(shape=(4,), dtype="float64", axes=("batch",))})["x"].dtype == jnp.float32
