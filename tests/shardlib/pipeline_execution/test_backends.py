"""What backends do otherwise: ring buffers written outside of the branches (TPU), residuals in host memory."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardlib as sl
from models import llama
from shardlib import gradients
from tests.shardlib.pipeline_execution.chains import gradient, through

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 4, 4)).astype(np.float32) * 0.5


def loss(params, batch, rng):
    layer = lambda x, w: x + jnp.tanh(checkpoint_name(x @ w, "hidden"))  # noqa: E731
    return (through(params, batch["x"], layer)[0] ** 2).sum(-1).mean()


def check(**plan):
    wanted, one = gradient(loss, {"x": X}, value=W, mesh="data=1")
    found, metrics = gradient(loss, {"x": X}, value=W, num_microbatches=4, **plan)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], one["loss"], rtol=1e-6)


@pytest.mark.parametrize("plan", [{"residuals": "full"}, {"residuals": "none", "schedule": "gpipe"}, {"chunks": 2}])
def test_rings_written_outside_of_the_branches(plan, monkeypatch):
    options = gradients._options
    monkeypatch.setattr(gradients, "_options", lambda *given: replace(options(*given), inside=False))
    check(mesh="stage=2", **plan)


def test_residuals_in_host_memory():
    check(mesh="stage=2,data=2", residuals="offload:hidden")


def test_explain_says_which_side_inputs_there_are():
    module, loss, spec = llama.tiny(layers=4, batch=4, length=8)
    found = sl.bind(module, loss, sl.Plan(mesh="stage=2", num_microbatches=2), spec).explain().pipeline
    assert found.shared_inputs and all("[" in text for text in found.shared_inputs)
    said = f"{' + '.join(found.shared_inputs)} read by every layer; every stage makes them again"
    assert said in str(sl.bind(module, loss, sl.Plan(mesh="stage=2", num_microbatches=2), spec).explain())
