"""Field troubles, group DON: donated state comes out where it went in, and a donation that is not used is named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.audit.donation import check_donations, unused_donations
from tests.tiny import LOWERINGS, rows, weight


def compiled(out):
    """A step on fsdp=8 whose results have the given specs; `never` is donated and not read."""
    mesh = sl.make_mesh("fsdp=8")
    where = sl.shardings({"kept": P("fsdp"), "moved": P("fsdp"), "never": P("fsdp")}, mesh)
    state = {name: jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sharding) for name, sharding in where.items()}
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sl.shardings(P(), mesh))
    step = lambda state, x: {name: state[name] + x for name in ("kept", "moved")}  # noqa: E731
    return jax.jit(step, donate_argnums=0, out_shardings=sl.shardings(out, mesh)).lower(state, x).compile()


@pytest.mark.newest
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_don_03_a_donation_that_is_not_used_is_named_with_its_bytes():
    program = compiled({"kept": P("fsdp"), "moved": P()})
    moved, never = unused_donations(program)
    assert (moved.path, moved.shape, moved.bytes_per_device) == ("0/moved", (16, 32), 16 * 32 * 4 // 8)
    assert (never.path, never.reason) == ("0/never", "the program never reads it")
    with pytest.raises(
        sl.ShardingError, match=r"0/moved \[16, 32\]: 256 bytes on each device, no result has its bytes"
    ):
        check_donations(program)


def test_don_03_used_donations_are_not_named():
    assert [unused.path for unused in unused_donations(compiled({"kept": P("fsdp"), "moved": P("fsdp")}))] == [
        "0/never"
    ]
    mesh = sl.make_mesh("fsdp=8")
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sl.shardings(P("fsdp"), mesh))
    for donated in ((), (0,)):
        program = jax.jit(lambda x: x + 1, donate_argnums=donated).lower(x).compile()
        assert unused_donations(program) == ()
        check_donations(program)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_don_02_the_specs_of_donated_state_are_pinned(lowering):
    """The loss leaves the layout of what it computes to the compiler; the state's is the plan's all the same."""

    def loss(params, batch, rng):
        return sl.Loss(total=(batch["x"] * jnp.roll(params["w"].get_value(), 1)[None]).sum(), weight=None)

    plan = sl.Plan(mesh="fsdp=2", lowering=lowering)
    trainer = sl.Trainer(sl.bind(weight(np.ones(16), "embed"), loss, plan, {"x": rows(8, 16)}), optax.sgd(1.0))
    before = trainer.init(jax.random.key(0))
    state, _ = trainer.step(before, {"x": np.ones((8, 16), np.float32)})
    leaf, donated = (one.params["w"].get_value() for one in (state, before))
    assert leaf.sharding.is_equivalent_to(sl.shardings(P("fsdp"), trainer.mesh), 1)
    assert donated.is_deleted() and unused_donations(trainer.compiled) == ()
    np.testing.assert_array_equal(leaf, np.full(16, -7.0))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_don_04_a_donated_step_of_several_emulated_devices_computes_what_one_does(lowering):
    draw = np.random.default_rng(0)
    batch = {"x": draw.normal(size=(16, 8)).astype(np.float32), "y": draw.normal(size=(16, 1)).astype(np.float32)}
    spec = {"x": rows(16, 8), "y": rows(16, 1)}

    def loss(params, batch, rng):
        return jnp.square(sl.constrain(batch["x"] @ params["w"].get_value(), "batch", None) - batch["y"]).mean()

    def trained(mesh):
        plan = sl.Plan(mesh=mesh, lowering=lowering)
        trainer = sl.Trainer(sl.bind(weight(np.ones((8, 1)), None, None), loss, plan, spec), optax.sgd(0.1))
        state = trainer.init(jax.random.key(0))
        for _ in range(5):
            state, _ = trainer.step(state, batch)
        assert unused_donations(trainer.compiled) == ()
        return state.params["w"].get_value()

    np.testing.assert_allclose(trained("data=8"), trained("data=1"), rtol=0, atol=1e-6)
