"""Which scans of a loss are its layers, and which of its checkpoints go: traced only, nothing is compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardlib.jax_compat import is_checkpoint
from shardlib.layer_scan import equations_within, layer_scans, sources
from shardlib.remat import Policy, with_policy

FULL = Policy(kind="full")
PARAMS = {"layers": jnp.full((3, 4, 4), 0.1), "head": jnp.ones((4, 6))}
BATCH = {"x": jnp.ones((2, 4))}


def layer(x, w):
    return jnp.tanh(x @ w), None


def stack(layer, x, w, **options):
    return jax.lax.scan(layer, x, w, **options)[0]


def plain(params, batch, rng):
    return (stack(layer, batch["x"], params["layers"]) @ params["head"]).sum()


def found(loss, params=PARAMS, batch=BATCH):
    closed = jax.make_jaxpr(loss)(params, batch, None)
    return layer_scans(closed, sources(params, batch, None))


def checkpoints(loss, params=PARAMS, batch=BATCH):
    return sum(map(is_checkpoint, equations_within(jax.make_jaxpr(loss)(params, batch, None))))


def products(loss, params=PARAMS, batch=BATCH):
    gradient = jax.make_jaxpr(jax.grad(loss))(params, batch, None)
    return sum(equation.primitive.name == "dot_general" for equation in equations_within(gradient))


def cast(params, batch, rng):
    return plain(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params), batch, rng)


def merged(params, batch, rng):
    """Stacked parameters computed from others, as LoRA does."""
    return plain(params | {"layers": jnp.einsum("lij,ljk->lik", params["layers"], params["layers"])}, batch, rng)


def jitted(params, batch, rng):
    return jax.jit(plain)(params, batch, rng)


def jitted_embedding(params, batch, rng):
    """One call returns parameters and activations: their sources must not mix."""
    w, x = jax.jit(lambda params, batch: (params["layers"] * 2, batch["x"] @ params["layers"][0]))(params, batch)
    return stack(layer, x, w).sum()


def conditional(params, batch, rng):
    return jax.lax.cond(batch["x"].sum() > 0, lambda: plain(params, batch, rng), lambda: 0.0)


def by_microbatch(params, batch, rng):
    body = lambda total, x: (total + plain(params, {"x": x[None]}, rng), None)  # noqa: E731
    return jax.lax.scan(body, 0.0, batch["x"])[0]


def manual(params, batch, rng):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    local = lambda params, batch: jax.lax.psum(plain(params, batch, None), "data")  # noqa: E731
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    return jax.shard_map(local, **specs)(params, batch)


def learned_start(params, batch, rng):
    """Latents of a Perceiver: the carry starts from parameters alone."""
    attend = lambda x, w: (jnp.tanh(x @ w + batch["x"].sum()), None)  # noqa: E731
    return stack(attend, params["head"].T, params["layers"]).sum()


@pytest.mark.parametrize(
    "loss",
    [plain, cast, merged, jitted, jitted_embedding, conditional, by_microbatch, manual, learned_start],
    ids=lambda loss: loss.__name__,
)
def test_the_layers_are_found_and_checkpointed_once(loss):
    (scan,) = found(loss)
    assert scan.length == 3
    assert any(scan.stacked)
    assert checkpoints(loss) == 0
    assert checkpoints(with_policy(loss, FULL)) == 1
    assert products(with_policy(loss, FULL)) == products(loss) + 1
    assert checkpoints(with_policy(with_policy(loss, FULL), FULL)) == 1


def test_two_stacks_in_a_row_are_two_layer_scans():
    def loss(params, batch, rng):
        x = stack(layer, batch["x"], params["layers"])
        return stack(lambda x, w: layer(x @ w, w), x, params["layers"][:2]).sum()

    assert [scan.length for scan in found(loss)] == [3, 2]
    assert checkpoints(with_policy(loss, FULL)) == 2


def chunked_head(params, batch, rng):
    """Cross entropy by chunks of the vocabulary: slices parameters, but starts from zeros."""
    x = stack(layer, batch["x"], params["layers"])
    chunks = jnp.moveaxis(params["head"].reshape(4, 3, 2), 1, 0)
    body = jax.checkpoint(lambda total, w: (total + jnp.exp(x @ w).sum(-1), None))
    return jnp.log(jax.lax.scan(body, jnp.zeros(2), chunks)[0]).sum()


def recurrent(params, batch, rng):
    """A loop over time inside the loss, beside the layers."""
    x = stack(layer, batch["x"], params["layers"])
    return jax.lax.scan(jax.checkpoint(lambda h, x: (jnp.tanh(h + x), None)), jnp.zeros(4), x)[0].sum()


@pytest.mark.parametrize("loss", [chunked_head, recurrent], ids=lambda loss: loss.__name__)
def test_other_loops_keep_their_own_checkpoints(loss):
    (scan,) = found(loss)
    assert scan.length == 3
    assert checkpoints(with_policy(loss, Policy(kind="none"))) == 1
    assert checkpoints(with_policy(loss, FULL)) == 2


def test_of_nested_stacks_the_one_with_products_of_its_own_is_the_layer():
    params = {"layers": jnp.full((2, 3, 4, 4), 0.5)}

    def repeated(params, batch, rng):
        inner = jax.checkpoint(lambda x, w: (stack(jax.checkpoint(layer), x, w), None))
        return stack(inner, batch["x"], params["layers"]).sum()

    def experts(params, batch, rng):
        outer = lambda x, w: (stack(jax.checkpoint(layer), x @ w[0], w), None)  # noqa: E731
        return stack(outer, batch["x"], params["layers"]).sum()

    assert [scan.length for scan in found(repeated, params)] == [3]
    assert checkpoints(with_policy(repeated, FULL), params) == 1
    assert [scan.length for scan in found(experts, params)] == [2]
    assert checkpoints(with_policy(experts, FULL), params) == 2  # the layer's, and the one in a loop inside it


def remat_body(params, batch, rng):
    return plain_with(jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable))(params, batch, rng)


def remat_part(params, batch, rng):
    product = jax.jit(jax.checkpoint(lambda x, w: x @ w))
    return plain_with(lambda x, w: (jnp.tanh(product(product(x, w), w)), None))(params, batch, rng)


def remat_nested(params, batch, rng):
    return plain_with(jax.checkpoint(jax.checkpoint(layer)))(params, batch, rng)


def remat_around(params, batch, rng):
    whole = jax.checkpoint(lambda x, w: stack(layer, x, w))
    return (whole(batch["x"], params["layers"]) @ params["head"]).sum()


def remat_everything(params, batch, rng):
    return jax.checkpoint(jax.jit(plain), static_argnums=2)(params, batch, rng)


def plain_with(layer):
    return lambda params, batch, rng: (stack(layer, batch["x"], params["layers"]) @ params["head"]).sum()


@pytest.mark.parametrize(
    "loss",
    [remat_body, remat_part, remat_nested, remat_around, remat_everything],
    ids=lambda loss: loss.__name__,
)
def test_the_models_own_checkpoints_go(loss):
    none, full = with_policy(loss, Policy(kind="none")), with_policy(loss, FULL)
    assert checkpoints(loss) > 0
    assert checkpoints(none) == 0
    assert checkpoints(full) == 1
    forward = 2 if loss is remat_part else 1
    assert products(full) == products(none) + forward
    want, got = (jax.jit(jax.grad(f))(PARAMS, BATCH, None) for f in (loss, full))
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-5, atol=0), want, got))


def test_unrolled_layers_are_kept_apart_from_their_recomputation():
    for options, wanted in (({}, False), ({"unroll": 3}, True)):
        loss = lambda params, batch, rng, options=options: stack(  # noqa: E731
            layer, batch["x"], params["layers"], **options
        ).sum()
        jaxpr = jax.make_jaxpr(with_policy(loss, FULL))(PARAMS, BATCH, None)
        (checkpoint,) = filter(is_checkpoint, equations_within(jaxpr))
        assert checkpoint.params["prevent_cse"] is wanted


def test_named_scopes_survive_the_inlining():
    scoped = jax.named_scope("mine")(lambda x, w: (jnp.sin(x @ w), None))
    loss = lambda params, batch, rng: stack(jax.checkpoint(scoped), batch["x"], params["layers"]).sum()  # noqa: E731
    none = with_policy(loss, Policy(kind="none"))
    text = jax.jit(none).lower(PARAMS, BATCH, None).as_text(debug_info=True)
    assert "mine/sin" in text
