"""Field troubles, group SCN: stacked layers and their names. There is no SCN-3."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from shardlib import annotate
from shardlib.rules import Rules
from shardlib.specs import array_leaves, resolve

RULES = Rules.parse(["embed -> a", "mlp -> b", "layers -> stage"])
MESH = "a=2,b=2,stage=3"


def kernel_init():
    return annotate.logical(nn.initializers.lecun_normal(), "embed", "mlp")


@pytest.mark.newest
def test_scn_01_remat_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, use_bias=False, kernel_init=kernel_init(), name="dense")(x)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat_scan(Layer, lengths=(2,))(name="layers")(x)

    variables = jax.eval_shape(Stack().init, jax.random.key(0), jnp.ones((4, 3)))
    rules = Rules.parse(["embed -> none", "mlp -> none", "layers -> none"])
    (entry,) = resolve(variables, rules, MESH).entries
    assert (entry.shape, entry.names) == ((2, 3, 3), ("layers", "embed", "mlp"))
    assert entry.spec == P(None, None, None)


def test_scn_02_bridge_metadata():
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            init = annotate.nnx_logical(nnx.initializers.lecun_normal(), "embed", "mlp")
            self.up = nnx.Linear(8, 16, use_bias=False, kernel_init=init, rngs=rngs)
            down = annotate.nnx_logical(nnx.initializers.lecun_normal(), "mlp", "embed")
            self.down = nnx.Linear(16, 8, use_bias=False, kernel_init=down, rngs=rngs)

        def __call__(self, x):
            return self.down(self.up(x))

    slices = []

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            layer = nnx.bridge.to_linen(Layer, name="layer")
            x = layer(x)
            slices.append({leaf.path: (leaf.names, leaf.shape) for leaf in array_leaves(layer.variables["params"])})
            return x, None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
            return scan(name="layers")(x, None)[0]

    stack = Stack()
    variables = jax.eval_shape(stack.init, jax.random.key(0), jnp.ones((2, 8)))
    found = {leaf.path.split("layer/")[-1].split("/")[0]: (leaf.names, leaf.shape) for leaf in array_leaves(variables)}
    assert found == {"up": (("layers", "embed", "mlp"), (4, 8, 16)), "down": (("layers", "mlp", "embed"), (4, 16, 8))}
    slices.clear()
    jax.eval_shape(stack.apply, variables, jnp.ones((2, 8)))
    inner = {path.split("/")[0]: value for path, value in slices[-1].items()}
    assert inner == {"up": (("embed", "mlp"), (8, 16)), "down": (("mlp", "embed"), (16, 8))}


@pytest.mark.parametrize("axis", [-1, 2])
def test_scn_04_negative_stack_axis(axis):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            self.param("kernel", kernel_init(), (4, 8))
            return x, None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Body, variable_axes={"params": axis}, split_rngs={"params": True}, length=3)
            return scan(name="layers")(x, None)[0]

    boxed = jax.eval_shape(Stack().init, jax.random.key(0), jnp.ones(1))["params"]

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=axis)
    def layers(rngs):
        init = annotate.nnx_logical(nnx.initializers.lecun_normal(), "embed", "mlp")
        return nnx.Linear(4, 8, use_bias=False, kernel_init=init, rngs=rngs)

    stacked = nnx.eval_shape(lambda: annotate.name_stack(layers(nnx.Rngs(0)), axis=axis))
    for tree in (boxed, nnx.state(stacked, nnx.Param)):
        (entry,) = resolve(tree, RULES, MESH).entries
        assert (entry.shape, entry.names) == ((4, 8, 3), ("embed", "mlp", "layers"))
        assert entry.spec == P("a", "b", "stage")


def test_scn_09_nnx_stack_with_its_own_keys():
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            init = annotate.nnx_logical(lambda key, shape, dtype: jnp.eye(*shape, dtype=dtype), "embed", "mlp")
            self.linear = nnx.Linear(64, 64, use_bias=False, kernel_init=init, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.linear(x))

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def layers(rngs):
        return Block(rngs)

    stack = annotate.name_stack(layers(nnx.Rngs(0)))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(x, block):
        return x, block(x) != 0

    _, masks = run(jnp.ones(64), stack)
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == 3
    found = resolve(stack, Rules.parse(["embed -> a", "mlp -> b", "layers -> none"]), "a=2,b=2")
    specs = {entry.path: entry.spec for entry in found.entries}
    assert specs.pop("linear/kernel") == P(None, "a", "b")
    assert specs, "the stack holds keys and counts of its own"
    assert all(spec in (P(), P(None)) for spec in specs.values())
