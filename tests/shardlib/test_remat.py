"""Remat policies on the example models: same gradients, what is stored, what is recomputed, and the messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.errors import ShardingError
from models import gpt, gpt_nnx, llama
from shardlib import annotate, remat
from shardlib.audit.memory import read_memory
from shardlib.jax_compat import is_checkpoint
from shardlib.layer_scan import equations_within
from shardlib.remat import Policy, parse_policy, with_policy

POLICIES = ("none", "dots", "dots_no_batch", "names:attention_out,mlp_hidden", "offload:attention_out", "full")
MODELS = {"linen": gpt, "nnx": gpt_nnx, "llama": llama}
RNG = jax.random.key(5)


# Compile time is most of the time of this file, and nothing here depends on the optimizer of the CPU code.
QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def example(name, remat=False):
    """Loss, parameters and batch of a model of 4 tiny layers, with dropout where it has any."""
    sizes = {"layers": 4, "embed": 16, "heads": 2, "mlp": 32, "vocab": 16, "length": 8, "remat": remat}
    config = llama.Config(kv_heads=1, **sizes) if name == "llama" else gpt.Config(dropout=0.2, bias=False, **sizes)
    module, loss, spec = MODELS[name].build(config, batch=4)
    draw = np.random.default_rng(0)
    batch = {key: jnp.asarray(draw.integers(16, size=leaf.shape), jnp.int32) for key, leaf in spec.items()}
    if name == "linen":
        boxed = jax.eval_shape(module.init, jax.random.key(0), batch["inputs"])["params"]
        is_box = lambda leaf: isinstance(leaf, annotate.LogicalAxes)  # noqa: E731
        shapes = jax.tree.map(lambda leaf: leaf.value, boxed, is_leaf=is_box)
    else:
        shapes = jax.eval_shape(lambda: nnx.state(module(nnx.Rngs(0))))
    params = jax.tree.map(lambda leaf: jnp.asarray(0.3 * draw.standard_normal(leaf.shape), jnp.float32), shapes)
    return loss, params, batch


def objective(loss):
    return lambda params, batch, rng: loss(params, batch, rng).value()


@functools.cache
def compiled(name, policy, remat=False):
    loss, params, batch = example(name, remat)
    loss = loss if policy is None else with_policy(loss, parse_policy(policy))
    return jax.jit(jax.value_and_grad(objective(loss))).lower(params, batch, RNG).compile(compiler_options=QUICK)


def count(loss, params, batch, *, of="dot_general"):
    gradient = jax.make_jaxpr(jax.grad(objective(loss)))(params, batch, RNG)
    return sum(equation.primitive.name == of for equation in equations_within(gradient))


def forward_products(loss, params, batch):
    forward = jax.make_jaxpr(loss)(params, batch, RNG)
    (layer,) = [equation for equation in equations_within(forward) if equation.primitive.name == "scan"]
    return sum(equation.primitive.name == "dot_general" for equation in equations_within(layer.params["jaxpr"]))


ORDERED = ("none", "dots", "names:attention_out,mlp_hidden", "full")
QUICK_PAIRS = [("linen", policy) for policy in ORDERED]
QUICK_PAIRS += [("nnx", "offload:attention_out"), ("llama", "dots_no_batch")]


@pytest.mark.parametrize(
    "name, policy",
    [
        pytest.param(name, policy, marks=[] if (name, policy) in QUICK_PAIRS else pytest.mark.exhaustive)
        for name in MODELS
        for policy in POLICIES
    ],
)
def test_same_loss_and_gradients(name, policy):
    _, params, batch = example(name)
    want, want_grads = compiled(name, None)(params, batch, RNG)
    got, grads = compiled(name, policy)(params, batch, RNG)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want_grads))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * size)


def test_the_less_is_named_the_less_is_stored():
    temporaries = [read_memory(compiled("linen", policy)).temp_bytes for policy in ORDERED]
    assert temporaries == sorted(temporaries, reverse=True)
    assert len(set(temporaries)) == len(temporaries)
    # One saved value of mlp_hidden is [batch, length, mlp] = 4 KiB, of attention_out 2 KiB, in each of 4 layers.
    assert temporaries[2] - temporaries[3] == pytest.approx(4 * (4096 + 2048), rel=0.3)


def check_recomputes(loss, params, batch):
    """`full` runs the forward products of the layer once more than `none`, less the last, whose result nobody reads."""
    none, full = (with_policy(loss, Policy(kind=kind)) for kind in ("none", "full"))
    assert count(full, params, batch) - count(none, params, batch) == forward_products(loss, params, batch) - 1


@pytest.mark.newest
@pytest.mark.parametrize("own", [False, True], ids=["plain", "own-remat"])
@pytest.mark.parametrize("name", MODELS)
def test_one_recomputation_whether_or_not_the_model_has_remat(name, own):
    loss, params, batch = example(name, own)
    check_recomputes(loss, params, batch)
    none = count(with_policy(loss, Policy(kind="none")), params, batch)
    assert none == 3 * forward_products(loss, params, batch) + 3  # of the layer, and the head
    assert count(with_policy(loss, Policy(kind="dots")), params, batch) == none
    assert count(loss, params, batch) == (none + forward_products(loss, params, batch) - 1 if own else none)


def test_a_policy_that_is_not_applied_is_noticed(monkeypatch):
    monkeypatch.setattr(remat, "_apply", lambda policy, scan: scan.equation)
    with pytest.raises(AssertionError):
        check_recomputes(*example("nnx"))


def test_a_doubled_remat_is_noticed(monkeypatch):
    monkeypatch.setattr(remat, "without_checkpoints", lambda jaxpr: jaxpr)
    with pytest.raises(AssertionError):
        check_recomputes(*example("nnx", True))


def offloads(policy, *, platform):
    loss, params, batch = example("nnx")
    gradient = jax.jit(jax.grad(objective(with_policy(loss, parse_policy(policy)))))
    return gradient.trace(params, batch, RNG).lower(lowering_platforms=(platform,)).as_text().count("pinned_host")


@pytest.mark.newest
def test_offload_moves_the_named_values_to_pinned_host():
    loss, params, batch = example("nnx")
    offload = with_policy(loss, parse_policy("offload:attention_out,mlp_hidden"))
    keep = with_policy(loss, parse_policy("names:attention_out,mlp_hidden"))
    assert count(offload, params, batch, of="device_put") == 4  # two values, there and back
    assert count(keep, params, batch, of="device_put") == 0
    # The CPU backend has one memory and drops the moves, so the program for a TPU is read; nothing compiles it.
    assert offloads("offload:attention_out,mlp_hidden", platform="tpu") == 2
    assert offloads("names:attention_out,mlp_hidden", platform="tpu") == 0
    assert offloads("offload:attention_out,mlp_hidden", platform="cpu") == 0


def sharded_loss(mesh):
    def layer(x, w):
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        if "tensor" in mesh.axis_names:
            hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, P(None, "tensor")))
        return x + jnp.sin(hidden), None

    return lambda params, batch, rng: jax.lax.scan(jax.checkpoint(layer), batch, params)[0].sum()


@pytest.mark.newest
@pytest.mark.parametrize("policy", ["full", "names:hidden", "offload:hidden"])
def test_in_a_manual_region_beside_an_automatic_axis(policy):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = 0.1 * jax.random.normal(jax.random.key(0), (3, 8, 8))
    batch = jax.random.normal(jax.random.key(1), (16, 8))
    loss = with_policy(sharded_loss(mesh), parse_policy(policy))

    def step(params, batch):
        grads = lambda params, batch: jax.lax.psum(jax.grad(loss)(params, batch, None), "data")  # noqa: E731
        specs = {"axis_names": {"data"}, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
        return jax.shard_map(grads, mesh=mesh, **specs)(params, batch)

    placed = jax.device_put(params, NamedSharding(mesh, P(None, None, "tensor")))
    got = jax.jit(step)(placed, jax.device_put(batch, NamedSharding(mesh, P("data"))))
    want = jax.jit(jax.grad(sharded_loss(jax.sharding.AbstractMesh((1,), ("data",)))))(params, batch, None)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_under_vmap_with_constraints_on_an_automatic_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = 0.1 * jax.random.normal(jax.random.key(0), (3, 8, 8))
    parts = jax.random.normal(jax.random.key(1), (4, 2, 8))

    def grads(loss):
        many = jax.vmap(lambda params, part: loss(params, part, None), (None, 0), spmd_axis_name="data")
        return jax.jit(jax.grad(lambda params: many(params, parts).sum()))(params)

    loss = sharded_loss(mesh)
    np.testing.assert_allclose(grads(with_policy(loss, Policy(kind="full"))), grads(loss), rtol=1e-5, atol=1e-5)


def test_any_pytree_with_state_passes_through():
    def loss(params, batch, rng, state):
        x = jax.lax.scan(lambda x, w: (x * w, None), batch, params)[0]
        return {"value": x.sum(), "state": state + 1, "constant": 2.0}

    result = with_policy(loss, Policy(kind="full"))(jnp.ones(3), jnp.ones(2), None, jnp.asarray(4))
    assert {name: float(value) for name, value in result.items()} == {"value": 2.0, "state": 5.0, "constant": 2.0}


@pytest.mark.parametrize("text", POLICIES)
def test_text_round_trips(text):
    assert str(parse_policy(text)) == text
    assert parse_policy(parse_policy(text)) == parse_policy(text)


def test_names_are_a_set():
    assert parse_policy("names: b, a,a") == parse_policy("names:a,b") == Policy(kind="names", names=("b", "a"))


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "fulll",
            "'fulll' is unknown (did you mean 'full'?)\n  fix: use one of full, none, dots, dots_no_batch, names:",
        ),
        ("", "'' is unknown\n  fix"),
        ("names", "'names' needs the names of what to store\n  fix: write 'names:attention_out,mlp_hidden'"),
        ("offload:", "'offload' needs the names"),
        ("full:a", "'full' takes no names, but got a\n  fix: write 'full', or 'names:a'"),
        ("full:", "nothing after the colon\n  full:\n      ^\n  fix: remove the colon"),
        ("names:a,,b", "an empty name\n  names:a,,b\n          ^\n  fix: remove the extra comma"),
        (None, "a remat policy is text, not NoneType"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(ShardingError) as raised:
        parse_policy(text)
    assert message in str(raised.value)


def test_unknown_names_list_those_of_the_layers():
    loss, params, batch = example("linen")
    with pytest.raises(ShardingError) as raised:
        with_policy(loss, parse_policy("offload:mlp_hiden,logits"))(params, batch, None)
    message = str(raised.value)
    assert "names in the layers: attention_out, mlp_hidden, mlp_out" in message
    assert "- no layer names a value 'mlp_hiden' (did you mean 'mlp_hidden'?)" in message
    assert "- no layer names a value 'logits'\n" in message + "\n"


def test_a_name_outside_the_layers_is_said_to_be_there():
    def loss(params, batch, rng):
        return checkpoint_name(jax.lax.scan(lambda x, w: (x * w, None), batch, params)[0], "logits").sum()

    with pytest.raises(ShardingError, match="'logits', only other parts of the loss do"):
        with_policy(loss, parse_policy("names:logits"))(jnp.ones(3), jnp.ones(2), None)


def unrolled(params, batch, rng, *, layer=lambda x, w: x * w):
    for w in params:
        batch = layer(batch, w)
    return jax.lax.scan(lambda total, x: (total + x, None), 0.0, batch)[0]


def test_a_loss_without_layers_says_what_was_found():
    with pytest.raises(ShardingError) as raised:
        with_policy(unrolled, Policy(kind="full"))(jnp.ones(3), jnp.ones(2), None)
    assert "the loss has no layers, that is no scan over stacked parameters" in str(raised.value)
    assert "found a scan of 2 steps\n  fix: run the layers under nn.scan, nnx.scan or lax.scan" in str(raised.value)


def test_none_needs_layers_only_where_there_is_a_checkpoint_to_remove():
    assert with_policy(unrolled, Policy(kind="none"))(jnp.ones(3), jnp.ones(2), None) == 2
    own = functools.partial(unrolled, layer=jax.checkpoint(lambda x, w: x * w))
    with pytest.raises(ShardingError, match="no layers"):
        with_policy(own, Policy(kind="none"))(jnp.ones(3), jnp.ones(2), None)


def test_the_forward_program_has_the_one_checkpoint():
    loss, params, batch = example("llama", True)
    for kind, wanted in (("none", 0), ("full", 1)):
        jaxpr = jax.make_jaxpr(with_policy(loss, Policy(kind=kind)))(params, batch, RNG)
        assert sum(map(is_checkpoint, equations_within(jaxpr))) == wanted
