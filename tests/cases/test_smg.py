"""Field troubles, group SMG: gradients through manual regions, and sums in them that multiply."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes import ShardingError
from shardlib.audit.redundant_sums import check_sums, unbound_axes_explained
from shardlib.rules import Rules
from shardlib.strategies import default_rules
from tests.tiny import LOWERINGS, gradient


def square_loss(params, batch, rng):
    return sl.Loss(total=(params["w"] ** 2 * batch["x"]).sum(), weight=None)


def check_one_sum(**plan):
    """SMG-1: d/dw of sum w^2 x at w=3 with x=0..7 is 168, counted once whatever the mesh."""
    found, metrics = gradient(square_loss, {"x": np.arange(8, dtype=np.float32)}, value=3.0, **plan)
    assert (float(found), float(metrics["loss"])) == (168.0, 252.0)


@pytest.mark.newest
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("mesh", ["data=8", "data=2,fsdp=2,tensor=2", "replica=2,data=4"])
def test_smg_01_gradients_are_summed_once(lowering, mesh):
    check_one_sum(mesh=mesh, lowering=lowering)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_smg_02_a_sum_is_a_sum(lowering):
    loss = lambda params, batch, rng: sl.Loss(  # noqa: E731
        total=params["w"] * batch["x"].sum(), weight=None, aux={"ones": sl.Sum(batch["x"].sum())}
    )
    found, metrics = gradient(loss, {"x": np.ones(8, np.float32)}, value=1.0, mesh="data=8", lowering=lowering)
    assert (float(found), float(metrics["loss"]), float(metrics["ones"])) == (8.0, 8.0, 8.0)


SPLIT = P("data")


def in_region(function, *, check_vma=True, spec=SPLIT):
    """The jaxpr of a function of eight values in a region manual over data=8."""
    region = jax.shard_map(function, mesh=sl.make_mesh("data=8"), in_specs=spec, out_specs=P(), check_vma=check_vma)
    return jax.make_jaxpr(lambda x: region(x))(jnp.ones(8))


def total(x):
    return jax.lax.psum(x.sum(), "data")


@pytest.mark.newest
@pytest.mark.parametrize("check_vma", [True, False])
def test_smg_02_a_sum_of_a_sum_is_named(check_vma):
    """Ones over data=8 summed twice are 64."""
    check_sums(in_region(total, check_vma=check_vma))
    twice = lambda x: jax.lax.psum(total(x), "data")  # noqa: E731
    line = f"test_smg.py:{twice.__code__.co_firstlineno}"
    with pytest.raises(ShardingError) as caught:
        check_sums(in_region(twice, check_vma=check_vma))
    heading, *problems = str(caught.value).splitlines()
    assert heading == "the loss sums over a mesh axis what was summed before:"
    assert len(problems) == 1 and problems[0].startswith("- psum at ")
    assert problems[0].endswith(
        f"{line}: its operand is the same on all devices of data=8, so the sum multiplies it by 8; "
        "fix: remove it, or use jax.lax.pmean"
    )


def in_a_scan(carry_in):
    """Sums a carry that starts the same everywhere in each turn; what a turn adds to it is `carry_in` of the shard."""

    def function(x):
        turn = lambda carry, _: (jax.lax.psum(carry, "data") / 16 + carry_in(x), None)  # noqa: E731
        return jax.lax.psum(jax.lax.scan(turn, 0 * x.sum(), None, length=2)[0], "data")

    return function


@pytest.mark.parametrize(
    "function, spec",
    [
        (total, P()),  # the operand enters whole
        (lambda x: jax.lax.psum(jax.lax.all_gather(x, "data").sum(), "data"), SPLIT),
        (lambda x: jax.lax.psum(jax.jit(jnp.sin)(total(x)), "data"), SPLIT),
        (lambda x: jax.lax.psum(jax.checkpoint(jnp.sin)(total(x)), "data"), SPLIT),
        (lambda x: jax.lax.psum(jax.lax.cond(total(x) > 0, jnp.sin, jnp.cos, total(x)), "data"), SPLIT),
        (lambda x: jax.lax.psum_scatter(jax.lax.all_gather(x, "data"), "data").sum(), SPLIT),
    ],
)
def test_smg_02_what_does_not_vary_is_followed(function, spec):
    with pytest.raises(ShardingError, match=r"psum|reduce_scatter at .*the same on all devices of data=8"):
        check_sums(in_region(function, check_vma=False, spec=spec))


@pytest.mark.parametrize(
    "function",
    [
        total,
        lambda x: jax.lax.pmean(total(x), "data"),  # a mean of what is the same is that
        lambda x: jax.lax.psum(jnp.ones(()), "data"),  # counts devices
        lambda x: jax.lax.psum(total(x) * jax.lax.axis_index("data"), "data"),
        lambda x: jax.lax.psum(jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, total(x)), "data"),
        lambda x: jax.lax.psum(jax.lax.ppermute(total(x), "data", [(0, 1)]), "data"),
        lambda x: jax.lax.psum(jax.lax.while_loop(lambda v: v < x.sum(), lambda v: v + 1, total(x)), "data"),
        in_a_scan(lambda x: x.sum()),
    ],
)
def test_smg_02_other_sums_pass(function):
    check_sums(in_region(function, check_vma=False))


def test_smg_02_a_sum_outside_any_region_is_named():
    def bare():
        return jax.make_jaxpr(lambda x: jax.lax.psum(x, "data"))(1.0)

    with pytest.raises(NameError):  # JAX's own advice is to add a region
        bare()
    with pytest.raises(ShardingError) as caught, unbound_axes_explained():
        bare()
    assert str(caught.value).startswith("the loss has a collective over the mesh axis 'data' at ")
    assert f"test_smg.py:{bare.__code__.co_firstlineno + 1}, outside any shard_map" in str(caught.value)
    assert "fix: remove it: a loss sees the whole batch" in str(caught.value)
    with pytest.raises(NameError, match="another"), unbound_axes_explained():
        raise NameError("name 'another' is not defined")


def test_smg_02_a_region_where_the_step_has_one():
    check_sums(in_region(total), manual=("fsdp",))
    with pytest.raises(ShardingError, match=r"a shard_map over data of its own at .*test_smg.py:\d+, and the step is"):
        check_sums(in_region(total), manual=("data", "fsdp"))


@pytest.mark.newest
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_smg_04_gradient_of_a_reshard(lowering):
    """A weighted sum of columns of an array split by rows: the gradient is the weights, 0..63."""
    rules = default_rules().with_first(Rules.parse(["rows -> tensor", "columns -> tensor"]))
    weights = np.arange(64, dtype=np.float32).reshape(8, 8)

    def by_constraint(params, batch, rng):
        w = sl.constrain(params["w"].get_value(), None, "columns")
        return sl.Loss(total=(w * weights).sum() * batch["x"].mean(), weight=None)

    plan = {"rules": rules, "lowering": lowering, "mesh": "tensor=8"}
    found, _ = gradient(by_constraint, {"x": np.ones(8, np.float32)}, value=weights, names=("rows", None), **plan)
    assert np.array_equal(found, weights)


def test_smg_04_gradient_of_an_all_to_all_of_the_users():
    weights = np.arange(64, dtype=np.float32).reshape(8, 8)

    def by_hand(params, batch, rng):
        swap = lambda w: jax.lax.all_to_all(w, "tensor", split_axis=1, concat_axis=0, tiled=True)  # noqa: E731
        swap = jax.shard_map(swap, in_specs=P("tensor", None), out_specs=P(None, "tensor"))
        w = swap(params["w"].get_value())
        return sl.Loss(total=(w * weights).sum() * batch["x"].mean(), weight=None)

    rules = default_rules().with_first(Rules.parse(["rows -> tensor"]))
    with jax.set_mesh(sl.make_mesh("tensor=8")):
        found, _ = gradient(
            by_hand, {"x": np.ones(8, np.float32)}, value=weights, names=("rows", None), rules=rules, mesh="tensor=8"
        )
    assert np.array_equal(found, weights)


@pytest.mark.newest
def test_smg_05_a_captured_value_under_slices():
    """A manual region of the user's that captures a value of its slice: right without slices, refused with them."""
    mesh = sl.make_mesh("data=8")

    def loss(params, batch, rng):
        captured = batch["x"] * params["w"]
        identity = jax.shard_map(lambda one: captured * one, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return sl.Loss(total=identity(jnp.ones((1,))).sum(), weight=None)

    batch = {"x": np.arange(1, 9, dtype=np.float32)}
    found, metrics = gradient(loss, batch, value=2.0, mesh="data=8", lowering="automatic")
    assert (float(found), float(metrics["loss"])) == (36.0, 72.0)
    with pytest.raises(ShardingError, match="the loss has a shard_map over data of its own"):
        gradient(loss, batch, value=2.0, mesh="data=8", lowering="automatic", random_slices=8)
