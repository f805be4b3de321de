"""Field troubles CLP: the global norm of gradients counts every element once, whatever the layout, and in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardlib.annotate import logical
from shardlib.batch_spec import ArraySpec
from shardlib.binding import bind
from shardlib.plan import Plan
from shardlib.rules import Rules
from shardlib.trainer import Trainer

SPEC = {"x": ArraySpec(shape=(8,), dtype="float32", axes=("batch",))}
ONES = {"x": np.ones(8, np.float32)}
RULES = Rules.parse(["batch -> replica+data+fsdp", "mlp -> tensor", "embed -> fsdp", "expert -> expert"])


class Linear(nn.Module):
    """Parameters whose gradients are given: the loss is their inner product with coefficients."""

    shapes: tuple

    @nn.compact
    def __call__(self, x):
        zeros = nn.initializers.zeros
        return {name: self.param(name, logical(zeros, *axes), shape) for name, shape, axes in self.shapes}


def clipped(mesh, gradients, axes, *, clip, lowering, **options):
    """The first update under SGD with rate 1 after clipping, sign turned: the clipped gradients."""
    shapes = tuple((name, value.shape, axes[name]) for name, value in gradients.items())
    module = Linear(shapes)

    def loss(params, batch, rng):
        total = sum((params[name] * jnp.asarray(value, params[name].dtype)).sum() for name, value in gradients.items())
        return total.astype(jnp.float32) * batch["x"].mean()

    plan = Plan(mesh=mesh, rules=RULES, lowering=lowering, **options)
    optimizer = optax.chain(clip, optax.sgd(1.0))
    trainer = Trainer(bind(module, loss, plan, SPEC), optimizer, check_separable=False)
    state, _ = trainer.step(trainer.init(jax.random.key(0)), ONES)
    return {name: -np.asarray(value) for name, value in state.params.items()}


def value(*numbers):
    return np.array(numbers, np.float32)


def inf_norm_clip(limit):
    def update(updates, state, params=None):
        norm = jnp.max(jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)]))
        return jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, limit / norm), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


both = pytest.mark.parametrize("lowering", ["automatic", "explicit"])


@both
def test_clp_01_replicated_gradients_count_once(lowering):
    gradients = {"split": value(3, 3), "copied": value(4)}
    axes = {"split": ("mlp",), "copied": (None,)}
    found = clipped("tensor=2", gradients, axes, clip=optax.clip_by_global_norm(1.0), lowering=lowering)
    np.testing.assert_allclose(found["split"], value(3, 3) / np.sqrt(34), rtol=1e-6)
    np.testing.assert_allclose(found["copied"], value(4) / np.sqrt(34), rtol=1e-6)
    assert abs(4 / found["copied"][0] - np.sqrt(50)) > 1  # the norm that counts the copy twice


@both
def test_clp_03_two_norm_and_inf_norm_over_shards(lowering):
    gradients, axes = {"w": value(3, 4)}, {"w": ("embed",)}
    two = clipped("fsdp=2", gradients, axes, clip=optax.clip_by_global_norm(1.0), lowering=lowering)
    np.testing.assert_allclose(two["w"], value(3, 4) / 5, rtol=1e-6)
    largest = clipped("fsdp=2", gradients, axes, clip=inf_norm_clip(1.0), lowering=lowering)
    np.testing.assert_allclose(largest["w"], value(3, 4) / 4, rtol=1e-6)


def test_clp_05_every_expert_once():
    gradients = {"experts": np.diag(value(1, 2, 3, 4))}
    axes = {"experts": ("expert", "mlp")}
    clip = optax.clip_by_global_norm(1.0)
    found = clipped("expert=2,tensor=2", gradients, axes, clip=clip, lowering="automatic")
    np.testing.assert_allclose(np.diag(found["experts"]), value(1, 2, 3, 4) / np.sqrt(30), rtol=1e-6)


@both
@pytest.mark.parametrize("zero", [0, 1])
def test_clp_06_every_shard_is_scaled_alike(lowering, zero):
    mesh = "fsdp=4" if zero == 0 else "data=4"
    axes = {"w": ("embed",)}
    clip = optax.clip_by_global_norm(1.0)
    found = clipped(mesh, {"w": value(1, 1, 1, 1)}, axes, clip=clip, lowering=lowering, zero=zero)
    np.testing.assert_allclose(found["w"], value(0.5, 0.5, 0.5, 0.5), rtol=1e-6)


def test_the_norm_is_float32_under_bfloat16_compute():
    # 4,097 ones: a bfloat16 sum of squares stops at 256.
    gradients, axes = {"w": np.ones(4097 * 8, np.float32).reshape(8, 4097)}, {"w": ("embed", None)}
    clip = optax.clip_by_global_norm(1.0)
    found = clipped("fsdp=8", gradients, axes, clip=clip, lowering="explicit", compute_dtype="bfloat16")
    np.testing.assert_allclose(found["w"], 1 / np.sqrt(8 * 4097), rtol=1e-5)
