"""What "equal" means everywhere, and small models and batches shared by tests.

float32, leaf by leaf: max|a - b| <= 1e-5 x max(max|leaf|, 1e-3 x rms of the whole tree); losses relative 1e-6.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from models import gpt, gpt_nnx, llama
from shardlib.tree_paths import leaves_with_paths

SIZES = {"layers": 2, "embed": 32, "heads": 4, "mlp": 64, "vocab": 64, "length": 16}
BATCH = 8
MODELS: dict[str, Callable[..., Any]] = {
    "gpt": functools.partial(gpt.small, batch=BATCH, **SIZES),
    "gpt_nnx": functools.partial(gpt_nnx.small, batch=BATCH, **SIZES),
    "llama": functools.partial(llama.tiny, batch=BATCH, **SIZES),
}


def assert_trees_equal(found: Any, wanted: Any, what: str) -> None:
    """Every leaf within the tolerance; the first that is not is named."""
    pairs = list(zip(leaves_with_paths(found), leaves_with_paths(wanted), strict=True))
    whole = np.concatenate([np.asarray(leaf, np.float64).ravel() for _, leaf in leaves_with_paths(wanted)])
    floor = 1e-3 * float(np.sqrt(np.mean(whole**2)))
    for (path, a), (wanted_path, b) in pairs:
        assert path == wanted_path
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype == np.float32, f"{what} {path}: {a.dtype}, {b.dtype}"
        error, scale = float(np.max(np.abs(a - b))), max(float(np.max(np.abs(b))), floor)
        assert error <= 1e-5 * scale, f"{what} {path}: differs by {error:.3g}, leaf size {scale:.3g}"


def assert_losses_equal(found: Any, wanted: Any) -> None:
    """Step by step within relative 1e-6."""
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-6, atol=0)


class Recorded(NamedTuple):
    """The gradients of the last step."""

    grads: Any


def record_gradients() -> optax.GradientTransformation:
    """An optax transformation that passes gradients on and keeps them in its state."""
    return optax.GradientTransformation(
        init=lambda params: Recorded(optax.tree.zeros_like(params)),
        update=lambda grads, state, params=None: (grads, Recorded(grads)),
    )


OPTIMIZERS = {
    "sgd": optax.chain(record_gradients(), optax.sgd(0.1, momentum=0.9)),
    # With the default eps Adam amplifies the rounding of gradients that are zero in mathematics.
    "adam": optax.chain(record_gradients(), optax.adam(1e-3, eps=1e-3)),
}


class Run(NamedTuple):
    """What a run leaves behind, on the host."""

    losses: list[float]
    grads: list[Any]
    params: list[Any]


def token_batch(step: int, *, batch: int = BATCH, length: int = SIZES["length"], vocab: int = SIZES["vocab"]) -> Any:
    """A deterministic batch of token ids."""
    tokens = np.random.default_rng(step).integers(0, vocab, (batch, length + 1)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def host(tree: Any) -> Any:
    """The tree as numpy arrays."""
    return jax.tree.map(np.asarray, tree)


def run(trainer: Any, state: Any, *, num_steps: int = 3) -> Run:
    """Trains and keeps losses, gradients and parameters of every step; the optimizer records gradients first."""
    found = Run([], [], [])
    for step in range(num_steps):
        state, metrics = trainer.step(state, token_batch(step))
        found.losses.append(float(metrics["loss"]))
        found.grads.append(host(state.opt_state[0].grads))
        found.params.append(host(state.params))
    return found


def assert_equal_to_one_device(found: Run, wanted: Run) -> None:
    """Losses, gradients and parameters of every step."""
    assert_losses_equal(found.losses, wanted.losses)
    for step, (a, b) in enumerate(zip(found.grads, wanted.grads, strict=True)):
        assert_trees_equal(a, b, f"step {step} gradient")
    for step, (a, b) in enumerate(zip(found.params, wanted.params, strict=True)):
        assert_trees_equal(a, b, f"step {step} parameter")
