"""Masks by path and logical axes; parameters in two parts and back, for dicts and NNX states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from models import gpt, llama
from shardlib import annotate
from shardlib.specs import resolve
from shardlib.trainable import decay_mask, freeze, mask_from, merge, of_trainable, split
from shardlib.tree_paths import leaves_with_paths

SIZES = {"layers": 2, "embed": 32, "heads": 4, "mlp": 64}


def resolution(example):
    module, loss, spec = example
    return sl.bind(module, loss, sl.Plan(mesh="fsdp=4,tensor=2"), spec).params


def where(mask, wanted):
    return {path for path, flag in leaves_with_paths(mask) if flag is wanted}


def linear():
    init = annotate.nnx_logical(nnx.initializers.lecun_normal(), "embed", "mlp")
    return nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))


TREES = {
    "dict": lambda: {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)},
    "nnx": lambda: nnx.state(linear(), nnx.Param),
}


@pytest.mark.newest
@pytest.mark.parametrize("kind", TREES)
def test_split_and_merge_are_inverse_and_gradients_exist_for_one_part(kind):
    params = TREES[kind]()
    mask = jax.tree.map(lambda leaf: leaf.ndim == 2, params)
    trainable, frozen = split(params, mask)
    assert [leaf.shape for leaf in jax.tree.leaves(trainable)] == [(4, 8)]
    assert [leaf.shape for leaf in jax.tree.leaves(frozen)] == [(8,)]
    merged = merge(trainable, frozen)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(params), strict=True))

    def loss(params, scale):
        return scale * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    grads = jax.jit(jax.grad(of_trainable(loss, frozen)))(trainable, 0.5)
    assert jax.tree.structure(grads) == jax.tree.structure(trainable)
    np.testing.assert_allclose(jax.tree.leaves(grads)[0], jax.tree.leaves(trainable)[0], rtol=1e-6)
    state = optax.adam(1e-2).init(trainable)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(), (4, 8), (4, 8)]


def test_merge_refuses_parts_that_do_not_fit():
    trainable, _ = split({"a": 1, "b": 2}, {"a": True, "b": False})
    with pytest.raises(sl.ShardingError, match=r"\['a'\]: in both parts\n.*\['b'\]: in neither part"):
        merge(trainable, {"a": 1, "b": None})
    with pytest.raises(sl.ShardingError, match="are of different trees"):
        merge(trainable, {"a": None, "c": 2})


def test_masks_by_path_and_by_logical_axes():
    params = resolution(gpt.small(length=16, **SIZES))
    mlp = mask_from(lambda path, axes: "mlp" in axes and path.endswith("kernel"), params)
    assert where(mlp, True) == {"layers/mlp/up/kernel", "layers/mlp/down/kernel"}
    assert jax.tree.structure(mlp) == jax.tree.structure(params.specs)
    with pytest.raises(sl.ShardingError, match=r"holds for none of \d+ parameters") as error:
        mask_from(lambda path, axes: "lora_rank" in axes, params)
    assert "- embed/embedding (vocab, embed)" in str(error.value)


def test_decay_leaves_out_vectors_of_stacked_layers_and_listed_names():
    params = resolution(gpt.small(length=16, **SIZES))
    kept = {
        "embed/embedding",
        "head/kernel",
        "positions",
        *(f"layers/attention/{name}/kernel" for name in ("query", "key", "value", "out")),
        "layers/mlp/up/kernel",
        "layers/mlp/down/kernel",
    }
    # A bias of [layers, embed] or [layers, heads, head_dim] has the rank of a matrix, and still does not decay.
    assert where(decay_mask(params), True) == kept
    without = decay_mask(params, without=("bias", "norm", "vocab", "position"))
    assert where(without, True) == kept - {"embed/embedding", "head/kernel", "positions"}
    by_rank = jax.tree.map(lambda spec: len(spec) > 1, params.specs, is_leaf=lambda node: isinstance(node, P))
    assert where(by_rank, True) > kept


def test_decay_masks_fit_nnx_and_optax():
    bound = sl.bind(*llama.tiny(layers=2)[:2], sl.Plan(mesh="fsdp=4,tensor=2"), llama.tiny(layers=2)[2])
    mask = decay_mask(bound.params)
    assert not any("norm" in path for path in where(mask, True)) and where(mask, True)
    optimizer = optax.adamw(1e-3, mask=mask)
    assert jax.eval_shape(optimizer.init, bound.abstract_params)
    ones = jax.tree.map(lambda leaf: np.ones((1,) * leaf.ndim, np.float32), bound.abstract_params)
    zeros = jax.tree.map(np.zeros_like, ones)
    decay = optax.add_decayed_weights(0.5, mask=mask)
    updates, _ = decay.update(zeros, decay.init(ones), ones)
    for (path, update), flag in zip(leaves_with_paths(updates), jax.tree.leaves(mask), strict=True):
        assert float(update.ravel()[0]) == (0.5 if flag else 0.0), path


def test_words_of_paths_and_unknown_words():
    leaf = lambda *axes: annotate.LogicalAxes(jax.ShapeDtypeStruct((4,) * len(axes), jnp.float32), axes)  # noqa: E731
    tree = {
        "LayerNorm_0": {"w": leaf("embed", "mlp")},
        "RMSNorm_1": {"w": leaf("embed", "mlp")},
        "normal": {"w": leaf("embed", "mlp")},
        "qNorm": {"w": leaf("embed", "mlp")},
    }
    params = resolve(tree, sl.default_rules(), "fsdp=4")
    assert where(decay_mask(params), True) == {"normal/w"}
    with pytest.raises(sl.ShardingError, match="'emebd' is no word of a path and no logical axis") as error:
        decay_mask(params, without=("norm", "emebd"))
    assert "embed" in str(error.value)


def test_frozen_leaves_keep_their_bits_and_have_no_state():
    params = {"a": jnp.ones((4, 8)), "b": jnp.array([-0.0, 0.0, 1e-30, jnp.inf])}
    optimizer = freeze(optax.adamw(0.1), {"a": True, "b": False})
    state = optimizer.init(params)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(), (4, 8), (4, 8)]
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.ones_like, params), state, params)
    after = jax.jit(optax.apply_updates)(params, updates)
    assert np.asarray(after["b"]).tobytes() == np.asarray(params["b"]).tobytes()
    assert not np.array_equal(after["a"], params["a"])
    zeroed = optax.apply_updates(params, jax.tree.map(jnp.zeros_like, params))
    assert np.asarray(zeroed["b"]).tobytes() != np.asarray(params["b"]).tobytes()  # what adding 0.0 does to -0.0
