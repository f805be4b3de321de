"""The loss protocol: what combines exactly, and every wrong return refused before anything runs."""

import jax
import jax.numpy as jnp
import pytest

from meshes import ShardingError
from shardlib.loss import Loss, Mean, Sum, ratio
from shardlib.objective import sums_of


def test_the_objective_is_the_weighted_mean_plus_the_average_term():
    loss = Loss(total=jnp.float32(6), weight=4, per_microbatch=0.5, aux={"hits": Mean(3, 4), "tokens": Sum(4)})
    sums = sums_of(lambda *_: loss, None, None, None, state=None)
    value, metrics = sums.value(), sums.metrics()
    assert float(value) == 2.0
    assert {name: float(metric) for name, metric in metrics.items()} == {
        "loss": 2.0,
        "weight": 4.0,
        "hits": 0.75,
        "tokens": 4.0,
    }


def test_nothing_weighted_gives_zero_and_a_finite_gradient():
    assert float(ratio(0.0, 0)) == 0
    grad = jax.grad(lambda x: Loss(total=(x * 0).sum(), weight=0.0).value())(jnp.ones(3))
    assert not jnp.isnan(grad).any()


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (jnp.ones(3), "the loss has shape [3], not a scalar"),
        (jnp.int32(3), "the loss has dtype int32, not a floating-point number"),
        (jnp.bool_(True), "the loss has dtype bool, not a floating-point number"),
        ((jnp.float32(1), {"accuracy": 1.0}), "the loss is a tuple, not a scalar"),
        (None, "the loss is a NoneType, not a scalar"),
        (Loss(total=jnp.ones(3), weight=1), "the total of the loss has shape [3], not a scalar"),
        (Loss(total=1.0, weight=jnp.ones(2)), "the weight of the loss has shape [2], not a scalar"),
        (Loss(total=3, weight=1), "the total of the loss has dtype int32, not a floating-point number"),
        (Loss(total=1.0, weight=1, per_microbatch=jnp.ones(2)), "the per_microbatch of the loss has shape [2]"),
        (Loss(total=1.0, weight=1, aux={"a": 1.0}), "metric 'a' is a float, and only Mean and Sum say how it combines"),
        (Loss(total=1.0, weight=1, aux={"loss": Sum(1.0)}), "metric 'loss' has the name of a metric of the step"),
    ],
)
def test_wrong_returns_are_named(result, says):
    with pytest.raises(ShardingError) as caught:
        sums_of(lambda *_: result, None, None, None, state=None)
    assert says in str(caught.value)
    assert "fix: " in str(caught.value)
