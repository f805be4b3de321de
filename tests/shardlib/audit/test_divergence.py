"""A program in which only some stages would reach a collective is refused before it runs, and runs masked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from meshes import MeshShape, ShardingError
from shardlib import annotate
from shardlib.audit.divergence import check_no_divergence, divergent
from shardlib.audit.hlo import parse
from tests.oracle import host
from tests.shardlib.pipeline_execution.chains import through
from tests.tiny import rows, weight

WIDTH = 16
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, WIDTH, WIDTH)).astype(np.float32) * 0.3


def rolled(x, w):
    wide = annotate.constrain(x @ w, "batch", "mlp")
    return x + annotate.constrain(jnp.tanh(jnp.roll(wide, 3, axis=1)), "batch", "mlp")


def halved(x, w):
    left, right = jnp.split(annotate.constrain(x @ w, "batch", "mlp"), 2, axis=1)
    return x + jnp.tanh(jnp.concatenate([right, left], axis=1))


def straight(x, w):
    return x + jnp.tanh(annotate.constrain(x @ w, "batch", "mlp"))


def trainer(layer, **plan):
    loss = lambda params, batch, rng: (through(params, batch["x"], layer)[0] ** 2).mean()  # noqa: E731
    found = sl.bind(weight(W, "layers", "embed", "mlp"), loss, sl.Plan(**plan), {"x": rows(8, WIDTH)})
    return sl.Trainer(found, optax.sgd(0.1), check_separable=False)


def stepped(made):
    state, metrics = made.step(made.init(jax.random.key(0)), {"x": X})
    return float(metrics["loss"]), host(made.bound.restore(state.params))


@pytest.mark.parametrize("layer", [rolled, halved])
def test_a_move_of_the_compilers_inside_a_branch_is_refused_with_the_models_line(layer):
    with pytest.raises(ShardingError) as caught:
        _ = trainer(layer, mesh="stage=2,tensor=2", num_microbatches=2).compiled
    text = str(caught.value)
    assert "inside branches that only some stages take, so that the program would hang" in text
    assert "test_divergence.py" in text and 'fix: Plan(idle="mask")' in text


def test_the_same_model_runs_masked():
    found = stepped(trainer(rolled, mesh="stage=2,tensor=2", num_microbatches=2, idle="mask"))
    wanted = stepped(trainer(rolled, mesh="data=1"))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[1], wanted[1])


def test_a_program_without_such_moves_passes():
    program = parse(trainer(straight, mesh="stage=2,tensor=2", num_microbatches=2).compiled.as_text())
    mesh = MeshShape.parse("stage=2,tensor=2")
    assert divergent(program, mesh) == ()
    check_no_divergence(program, mesh)
    assert any(collective.in_branch for collective in program.collectives), "its own messages are in branches"
