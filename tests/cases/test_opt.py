"""Field troubles, group OPT: optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.optimizer_specs import optimizer_specs
from shardlib.rules import Rules
from shardlib.specs import resolve
from tests.cases.test_rul import array, small_model
from tests.tiny import rows, weight


@pytest.mark.parametrize("count", [1, 3])
def test_opt_01_stack_axis(count):
    rules = Rules.parse(["A -> a", "B -> b", "layers -> none"])
    tree = {"w": array(count, 16, 16, axes=("layers", "A", "B"))}
    specs = resolve(tree, rules, "a=2,b=4").specs
    params = {"w": jax.ShapeDtypeStruct((count, 16, 16), jnp.float32)}
    state = optimizer_specs(optax.adam(1e-3), params, specs)
    assert state[0].mu == state[0].nu == {"w": P(None, "a", "b")}


@pytest.mark.parametrize("mesh", ["data=8", "data=2,tensor=4"])
def test_opt_02_split_moments_leave_the_parameters_whole(mesh):
    batch = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}
    value = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    loss = lambda params, batch, rng: ((batch["x"] @ params["w"].get_value()) ** 2).mean()  # noqa: E731

    def run(**plan):
        bound = sl.bind(weight(value), loss, sl.Plan(**plan), {"x": rows(16, 8)})
        trainer = sl.Trainer(bound, optax.adam(1e-2))
        state = trainer.init(jax.random.key(0))
        for number in range(5):
            state, _ = trainer.step(state, batch)
            if number in (0, 4):
                param, moment = state.params["w"].get_value(), state.opt_state[0].mu["w"].get_value()
                yield np.array(param), param.sharding, moment.sharding

    plain = list(run(mesh="data=1"))
    for (param, own, moments), (wanted, *_) in zip(run(mesh=mesh, zero=1), plain, strict=True):
        assert own.is_fully_replicated
        assert "data" in str(moments.spec), moments
        np.testing.assert_allclose(param, wanted, rtol=0, atol=1e-6)


@pytest.mark.newest
def test_opt_03_state_is_born_sharded():
    model, loss, spec = small_model()
    trainer = sl.Trainer(
        sl.bind(model, loss, sl.Plan(mesh="fsdp=8"), spec), optax.MultiSteps(optax.adam(1e-3), every_k_schedule=4)
    )
    state = trainer.init(jax.random.key(0))
    inner = state.opt_state.inner_opt_state[0]
    for tree in (state.params, inner.mu, inner.nu, state.opt_state.acc_grads):
        assert {shard.data.shape for shard in tree["up"]["kernel"].addressable_shards} == {(8, 128)}
    for scalar in (inner.count, state.opt_state.mini_step, state.step):
        assert scalar.sharding.is_fully_replicated
        assert len(scalar.sharding.device_set) == 8


def test_opt_04_scalars_of_injected_hyperparameters():
    schedule = optax.linear_schedule(1e-3, 0.0, 10)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)
    )
    model, loss, spec = small_model()
    trainer = sl.Trainer(sl.bind(model, loss, sl.Plan(mesh="data=8"), spec), optimizer)
    state = trainer.init(jax.random.key(0))
    compiled, rates = trainer.compiled, []
    for _ in range(4):
        state, _ = trainer.step(state, {"x": np.ones((8, 64), np.float32)})
        assert trainer.compiled is compiled
        scalars = [leaf for leaf in jax.tree.leaves(state) if not leaf.shape]
        assert all(leaf.sharding.is_equivalent_to(jax.NamedSharding(trainer.mesh, P()), 0) for leaf in scalars)
        rates.append(float(state.opt_state[1].hyperparams["learning_rate"]))
    np.testing.assert_allclose(rates, [1e-3, 9e-4, 8e-4, 7e-4], rtol=1e-5)
