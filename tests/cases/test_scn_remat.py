"""Field troubles, group SCN: what a backward pass gathers and draws again, and how its gradients lie."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes.errors import ShardingError
from shardlib.audit import hlo
from shardlib.audit.contract import hold
from shardlib.gradients import StepSpecs, gradient_function
from shardlib.layer_scan import equations_within
from shardlib.remat import Policy, parse_policy, with_policy
from tests.moving import compiled
from tests.tiny import rows

FULL, NONE = Policy(kind="full"), Policy(kind="none")
# Compile time is most of the time of this file, and nothing here depends on the optimizer of the CPU code.
QUICK = {"xla_backend_optimization_level": 0}
LAYERS, BATCH, LENGTH, EMBED, MLP = 3, 2, 32, 16, 24
GATHERED, SPLIT = (LAYERS, BATCH, LENGTH, EMBED), (LAYERS, BATCH, LENGTH // 4, EMBED)


def mesh(*sizes):
    return jax.make_mesh(sizes, ("data", "tensor")[-len(sizes) :], axis_types=(AxisType.Auto,) * len(sizes))


def sequence_parallel(gather, split):
    """Norm on a sequence-split residual stream, gather, two products, back to the split."""

    def layer(x, w):
        x = split(x)
        whole = gather(x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5))
        return x + split(jnp.tanh(whole @ w["up"]) @ w["down"]), None

    return lambda params, batch, rng: jnp.square(jax.lax.scan(layer, batch, params)[0]).sum()


def data_of_scn_05():
    keys = jax.random.split(jax.random.key(0), 3)
    up, down = (0.2 * jax.random.normal(k, (LAYERS, *s)) for k, s in zip(keys, [(EMBED, MLP), (MLP, EMBED)]))
    return {"up": up, "down": down}, jax.random.normal(keys[2], (BATCH, LENGTH, EMBED))


@pytest.mark.newest
def test_scn_05_remat_of_gathers_in_the_automatic_lowering():
    tensor = mesh(4)
    place = lambda *axes: lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(tensor, P(*axes)))  # noqa: E731
    loss = sequence_parallel(place(None, None, None), place(None, "tensor", None))
    params, batch = data_of_scn_05()
    specs = {"up": P(None, None, "tensor"), "down": P(None, "tensor", None)}
    params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(tensor, spec)), params, specs)
    batch = jax.device_put(batch, NamedSharding(tensor, P(None, "tensor", None)))
    stored, grads, gathers = {}, {}, {}
    for policy in (NONE, FULL):
        compiled = (
            jax.jit(jax.grad(with_policy(loss, policy))).lower(params, batch, None).compile(compiler_options=QUICK)
        )
        text = compiled.as_text()
        stored[policy.kind] = {shape for shape in (GATHERED, SPLIT) if f"f32[{','.join(map(str, shape))}]" in text}
        grads[policy.kind] = compiled(params, batch, None)
        gathers[policy.kind] = sum(one.kind == "all-gather" for one in hlo.parse(text).collectives)
    # The CPU's partitioner stores the split value and gathers again even without remat; the test below has the control.
    assert stored["full"] == {SPLIT}
    assert gathers["full"] == gathers["none"] + 1
    assert_close(grads["full"], grads["none"])


def test_scn_05_remat_of_gathers_in_a_manual_region():
    tensor = mesh(4)
    loss = sequence_parallel(
        lambda x: jax.lax.all_gather(x, "tensor", axis=1, tiled=True),
        lambda x: (
            x if x.shape[1] == LENGTH // 4 else jax.lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
        ),
    )
    params, batch = data_of_scn_05()
    weights, rows = {"up": P(None, None, "tensor"), "down": P(None, "tensor", None)}, P(None, "tensor", None)

    def grads(policy):
        value = jax.grad(with_policy(loss, policy))
        specs = {"mesh": tensor, "in_specs": (weights, rows), "out_specs": weights, "check_vma": False}
        return jax.shard_map(lambda params, batch: value(params, batch, None), **specs)

    def stored(policy):
        """Shapes of what the forward loop hands on, for every layer."""
        equations = equations_within(jax.make_jaxpr(grads(policy))(params, batch))
        forward = next(equation for equation in equations if equation.primitive.name == "scan")
        return {var.aval.shape for var in forward.outvars}

    assert GATHERED in stored(NONE)
    assert GATHERED not in stored(FULL) and SPLIT in stored(FULL)
    assert stored(parse_policy("dots")) & {GATHERED} == set()
    assert_close(*(jax.jit(grads(policy), compiler_options=QUICK)(params, batch) for policy in (FULL, NONE)))


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_scn_06_remat_and_rng(generator):
    grid = mesh(4, 2)
    params, batch, key = data_of_scn_06(generator)
    placed = jax.device_put(params, NamedSharding(grid, P(None, None, "tensor")))
    rows = jax.device_put(batch, NamedSharding(grid, P("data", None)))
    gradient = lambda loss: jax.jit(jax.grad(loss), compiler_options=QUICK)  # noqa: E731
    want = gradient(dropped)(params, batch, key)
    none, full = (gradient(with_policy(dropped, policy))(placed, rows, key) for policy in (NONE, FULL))
    assert_close(full, none)
    assert_close(full, want)


def test_scn_06_unsafe_rbg_is_refused():
    params, batch, key = data_of_scn_06("unsafe_rbg")
    for policy in (FULL, Policy(kind="dots")):
        with pytest.raises(ShardingError) as raised:
            with_policy(dropped, policy)(params, batch, key)
        assert "unsafe_rbg" in str(raised.value)
        assert 'jax.random.key(seed, impl="threefry2x32")' in str(raised.value)
    assert with_policy(dropped, NONE)(params, batch, key) == dropped(params, batch, key)


def data_of_scn_06(generator):
    params = 0.3 * jax.random.normal(jax.random.key(0), (2, 16, 16))
    return params, jax.random.normal(jax.random.key(1), (8, 16)), jax.random.key(3, impl=generator)


def dropped(params, batch, rng):
    """An MLP of two layers with dropout of one half and the model's own remat."""

    def layer(x, own):
        w, key = own
        hidden = jnp.tanh(x @ w)
        return x + jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), 2 * hidden, 0.0), None

    return jnp.square(jax.lax.scan(jax.checkpoint(layer), batch, (params, jax.random.split(rng, 2)))[0]).sum()


class Dropped(nn.Module):
    """A scale per layer, then dropout of one half; which elements it kept is the layer's output."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (64,))
        kept = nn.Dropout(0.5, deterministic=False)(scale)
        return x + kept, kept != 0


class FunctionScan(nn.Module):
    """Three layers by a function-style `nn.scan`, with or without its own remat."""

    remat: bool

    @nn.compact
    def __call__(self, x):
        body = lambda module, x, _: module(x)  # noqa: E731
        body = nn.remat(body, prevent_cse=False) if self.remat else body
        lifted = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)
        return lifted(Dropped(name="layers"), x, None)[1]


@pytest.mark.parametrize("own_remat", [False, True])
def test_scn_08_scan_dropout_reuse(own_remat):
    module, x, key = FunctionScan(own_remat), jnp.ones(64), jax.random.key(1)
    params = {"layers": {"scale": jnp.ones((3, 64))}}
    masks = lambda params, x, rng: module.apply({"params": params}, x, rngs={"dropout": rng})  # noqa: E731
    want = np.asarray(masks(params, x, key))
    assert len({row.tobytes() for row in want}) == 3
    assert 0.25 < want.mean() < 0.75
    for policy in (NONE, FULL):
        np.testing.assert_array_equal(with_policy(masks, policy)(params, x, key), want)


def test_scn_08_a_layer_per_key_is_the_same_unrolled():
    params, x, key = jnp.ones((3, 64)), jnp.ones(64), jax.random.key(1)
    keys = jax.random.split(key, 3)

    def masks(params, x, rng):
        def layer(x, own):
            kept = jax.random.bernoulli(own[1], 0.5, x.shape)
            return x + own[0] * kept, kept

        return jax.lax.scan(layer, x, (params, jax.random.split(rng, 3)))[1]

    unrolled = jnp.stack([jax.random.bernoulli(one, 0.5, x.shape) for one in keys])
    np.testing.assert_array_equal(with_policy(masks, FULL)(params, x, key), unrolled)
    assert len({row.tobytes() for row in np.asarray(unrolled)}) == 3


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, out: (2 * out,))


@pytest.mark.parametrize("lowering", ["automatic", "explicit"])
def test_scn_07_gradients_have_the_specs_of_their_parameters(lowering):
    """Through an op with its own backward pass, and through a cumulative sum."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Param(0.1 * jax.random.normal(rngs.params(), (16, 24)), logical_axes=("embed", "mlp"))
            self.down = nnx.Param(0.1 * jax.random.normal(rngs.params(), (24, 16)), logical_axes=("mlp", "embed"))

    def loss(params, batch, rng):
        hidden = doubled(batch["x"] @ params["up"].get_value())
        hidden = jnp.cumsum(sl.constrain(hidden, "batch", "mlp"), axis=-1)
        return jnp.square(hidden @ params["down"].get_value()).mean()

    bound = sl.bind(Model, loss, sl.Plan(mesh="fsdp=8", lowering=lowering), {"x": rows(16, 16)})
    contract = hold(compiled(sl.Trainer(bound, optax.sgd(0.1)).lowered), bound.promised(), bound.plan.mesh)
    assert not contract.problems, str(contract)  # a gradient gathered whole would be one
    mesh, wanted = sl.make_mesh("fsdp=8"), bound.state_specs()[0]
    specs = StepSpecs(params=bound.params.specs, grads=wanted, batch=bound.batch.specs, batch_spec=bound.batch_spec)
    gradients = jax.jit(gradient_function(loss, bound.plan, mesh=mesh, specs=specs))
    params = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    batch = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
    placed = jax.device_put((params, batch), sl.shardings((bound.params.specs, bound.batch.specs), mesh))
    found, _ = gradients(*placed, jax.random.key(0), None)
    for name, spec in (("up", P("fsdp")), ("down", P(None, "fsdp"))):
        leaf = found[name].get_value()
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), (name, leaf.sharding)
    alone = jax.grad(loss)(params, batch, None)
    assert_close(*(jax.tree.map(np.asarray, tree) for tree in (found, alone)))
