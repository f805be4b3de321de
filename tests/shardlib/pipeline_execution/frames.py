"""A model of float frames: what comes before the layers and the loss read large inputs, and the layers a small one.

example = build()
trainer = reference.trainer_of(example, SGD, mesh="stage=4", num_microbatches=32, random_slices=ROWS)
reference.assert_equal(one_step(trainer), on_one_device(example))
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib as sl
from shardlib import annotate
from tests import oracle
from tests.shardlib.pipeline_execution import reference

FRAME, EMBED, MLP, OUT, LENGTH, LAYERS = 12, 8, 16, 10, 6, 4
ROWS = 32
NORMAL = nn.initializers.lecun_normal()
SGD = optax.sgd(0.1)


class Layer(nn.Module):
    """x + W2 tanh(W1 x) scaled by the kind of a row, with dropout."""

    @nn.compact
    def __call__(self, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        """[batch, length, embed] and [batch, 1, 1] to the same."""
        up, down = annotate.logical(NORMAL, "embed", "mlp"), annotate.logical(NORMAL, "mlp", "embed")
        hidden = jnp.tanh(nn.Dense(MLP, use_bias=False, kernel_init=up, name="up")(x))
        hidden = annotate.constrain(hidden, "batch", "length", "mlp")
        update = nn.Dense(EMBED, use_bias=False, kernel_init=down, name="down")(hidden)
        update = nn.Dropout(0.1, deterministic=not self.has_rng("dropout"))(update)
        return annotate.constrain(x + update * scale, "batch", "length", "embed"), None


class Frames(nn.Module):
    """A projection of frames, layers, a head that makes targets and frames again."""

    @nn.compact
    def __call__(self, frames: jax.Array, kinds: jax.Array) -> jax.Array:
        """[batch, length, FRAME] and int [batch] to [batch, length, OUT + FRAME]."""
        first, last = annotate.logical(NORMAL, None, "embed"), annotate.logical(NORMAL, "embed", None)
        x = nn.Dense(EMBED, use_bias=False, kernel_init=first, name="project")(frames)
        broadcast: Any = nn.broadcast
        stack = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=broadcast,
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: annotate.LAYERS},
        )
        x, _ = stack(name="layers")(x, 1 + 0.1 * kinds[:, None, None].astype(x.dtype))
        return nn.Dense(OUT + FRAME, use_bias=False, kernel_init=last, name="head")(x)


def build(*, batch: int = ROWS, length: int = LENGTH) -> Any:
    """The model, its loss, and its batch: frames are read at both ends, targets and weights by the loss alone."""
    module = Frames()
    apply: Any = module.apply

    def loss(params: Any, batch: Any, rng: Any) -> sl.Loss:
        rngs: Any = None if rng is None else {"dropout": rng}
        made = apply({"params": params}, batch["frames"], batch["kinds"], rngs=rngs)
        wanted = jnp.concatenate([batch["targets"], batch["frames"]], -1)
        errors = ((made - wanted) ** 2).mean(-1) * batch["weights"]
        return sl.Loss(total=errors.sum(), weight=batch["weights"].sum())

    tokens = ("batch", "length")
    return (
        module,
        loss,
        {
            "frames": sl.ArraySpec(shape=(batch, length, FRAME), dtype="float32", axes=(*tokens, None)),
            "kinds": sl.ArraySpec(shape=(batch,), dtype="int32", axes=("batch",)),
            "targets": sl.ArraySpec(shape=(batch, length, OUT), dtype="float32", axes=(*tokens, None)),
            "weights": sl.ArraySpec(shape=(batch, length), dtype="float32", axes=tokens),
        },
    )


def batch_of(spec: Any, step: int = 0) -> Any:
    """A deterministic batch; weights are 0, 1 or 2."""
    rng = np.random.default_rng(step)
    batch, length, _ = spec["frames"].shape
    return {
        "frames": rng.normal(size=(batch, length, FRAME)).astype(np.float32),
        "kinds": rng.integers(0, 5, batch).astype(np.int32),
        "targets": rng.normal(size=(batch, length, OUT)).astype(np.float32),
        "weights": rng.integers(0, 3, (batch, length)).astype(np.float32),
    }


def on_one_device(example: Any) -> oracle.Run:
    """Loss, gradients and parameters of one step, without the toolkit's own steps."""
    _, loss, spec = example
    params, run_key = reference.start(example)
    step = jax.jit(jax.value_and_grad(reference.objective_of(loss, slices=ROWS)))
    value, grads = step(params, batch_of(spec), jax.random.fold_in(run_key, 0))
    updates, _ = SGD.update(grads, SGD.init(params), params)
    return oracle.Run([float(value)], [oracle.host(grads)], [oracle.host(optax.apply_updates(params, updates))])


def one_step(trainer: Any) -> oracle.Run:
    """The same under a trainer's plan, in the model's own form."""
    state, metrics = trainer.step(trainer.init(jax.random.key(0)), batch_of(trainer.bound.batch_spec))
    restored = lambda tree: oracle.host(trainer.bound.restore(tree))  # noqa: E731
    return oracle.Run([float(metrics["loss"])], [restored(state.opt_state[0].grads)], [restored(state.params)])
