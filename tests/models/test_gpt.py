"""GPT in linen and in NNX on one device: the same numbers, every parameter named, the loss protocol kept."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from models import gpt, gpt_nnx, language
from shardlib.annotate import METADATA_KEY

TINY = {"layers": 3, "embed": 16, "heads": 2, "mlp": 32, "vocab": 32, "length": 8, "batch": 2}
NAMES = {
    "embed/embedding": ("vocab", "embed"),
    "positions": ("position", "embed"),
    "head/kernel": ("embed", "vocab"),
    "norm/scale": ("embed",),
    "norm/bias": ("embed",),
    "layers/attention_norm/scale": ("layers", "embed"),
    "layers/attention_norm/bias": ("layers", "embed"),
    "layers/attention/query/kernel": ("layers", "embed", "heads", "head_dim"),
    "layers/attention/query/bias": ("layers", "heads", "head_dim"),
    "layers/attention/key/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention/value/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention/value/bias": ("layers", "kv_heads", "head_dim"),
    "layers/attention/out/kernel": ("layers", "heads", "head_dim", "embed"),
    "layers/attention/out/bias": ("layers", "embed"),
    "layers/mlp_norm/scale": ("layers", "embed"),
    "layers/mlp_norm/bias": ("layers", "embed"),
    "layers/mlp/up/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/up/bias": ("layers", "mlp"),
    "layers/mlp/down/kernel": ("layers", "mlp", "embed"),
    "layers/mlp/down/bias": ("layers", "embed"),
}
BOTH = pytest.mark.parametrize("family", [gpt, gpt_nnx], ids=["linen", "nnx"])
# These programs run once: compiling them is the cost.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def tokens(seed=0, batch=2, length=8, vocab=32):
    ids = np.random.RandomState(seed).randint(0, vocab, (batch, length + 1)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


def abstract(family, module):
    """Parameters as abstract values: boxed for linen, a state for NNX."""
    if family is gpt:
        return jax.eval_shape(module.init, jax.random.key(0), tokens()["inputs"])["params"]
    return nnx.eval_shape(lambda: nnx.state(module(nnx.Rngs(0))))


def params_of(family, module, seed=0):
    """Parameters drawn from one random stream in the order of their paths, without compiling an init."""
    draw = np.random.RandomState(seed)
    return jax.tree.map(
        lambda leaf: (0.3 * draw.standard_normal(leaf.shape)).astype(leaf.dtype),
        nn.meta.unbox(abstract(family, module)),
    )


def apply_of(family, module):
    """(params, ids, dropout key or None) -> logits."""
    if family is gpt_nnx:
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: module(nnx.Rngs(0))))
        return lambda params, ids, key: nnx.merge(graphdef, params)(ids, key)

    def apply(params, ids, key):
        rngs = None if key is None else {"dropout": key}
        return module.apply({"params": params}, ids, deterministic=key is None, rngs=rngs)

    return apply


def as_nnx(params, like):
    """The linen parameters in the NNX state: the paths are the same."""
    flat = {path: variable.replace(_at(params, path)) for path, variable in nnx.to_flat_state(like)}
    return nnx.from_flat_state(flat)


def _at(tree, path):
    for name in path:
        tree = tree[name]
    return tree


def named(family, module):
    """Path -> (logical axes, shape), from abstract values."""
    tree = abstract(family, module)
    if family is gpt:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))
        return {_text(path): (leaf.names, leaf.value.shape) for path, leaf in leaves}
    flat = nnx.to_flat_state(tree)
    return {"/".join(path): (variable.get_metadata()[METADATA_KEY], variable.shape) for path, variable in flat}


def _text(path):
    return "/".join(key.key for key in path)


def close(left, right, tolerance=1e-5):
    """DESIGN's equality: leaf by leaf, with a floor from the whole tree."""
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    rms = np.sqrt(np.mean(np.concatenate([np.ravel(leaf) for leaf in right]) ** 2))
    return len(left) == len(right) and all(
        np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-3 * rms) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.newest
def test_linen_and_nnx_agree():
    module, loss, spec = gpt.small(**TINY)
    factory, nnx_loss, nnx_spec = gpt_nnx.small(**TINY)
    assert spec == nnx_spec
    params = params_of(gpt, module)
    state = as_nnx(params, params_of(gpt_nnx, factory))
    assert len(jax.tree.leaves(params)) == len(jax.tree.leaves(state))

    def value_and_grad(loss, params):
        return fast_jit(jax.value_and_grad(lambda params: loss(params, tokens(), None).value()))(params)

    with jax.numpy_dtype_promotion("strict"):
        value, grads = value_and_grad(loss, params)
        nnx_value, nnx_grads = value_and_grad(nnx_loss, state)
    np.testing.assert_allclose(value, nnx_value, rtol=1e-6)
    assert close(nnx_grads, as_nnx(grads, state))


def test_linen_and_nnx_agree_when_tied_and_without_biases():
    module, loss, _ = gpt.small(**TINY, tied=True, bias=False)
    factory, nnx_loss, _ = gpt_nnx.small(**TINY, tied=True, bias=False)
    params = params_of(gpt, module)
    state = as_nnx(params, params_of(gpt_nnx, factory))
    totals = [fast_jit(loss)(p, tokens(), None).total for loss, p in ((loss, params), (nnx_loss, state))]
    np.testing.assert_allclose(*totals, rtol=1e-6)


@BOTH
def test_every_parameter_is_named(family):
    found = named(family, family.small(**TINY)[0])
    assert {path: names for path, (names, _) in found.items()} == NAMES
    assert all(len(names) == len(shape) for names, shape in found.values())
    assert found["layers/attention/query/kernel"][1] == (3, 16, 2, 8)


@BOTH
def test_a_tied_head_is_no_parameter(family):
    found = named(family, family.small(**TINY, tied=True)[0])
    assert set(NAMES) - set(found) == {"head/kernel"}


@BOTH
def test_without_biases(family):
    found = named(family, family.small(**TINY, bias=False)[0])
    assert set(found) == {path for path in NAMES if not path.endswith("bias")}


@BOTH
def test_the_small_model(family):
    module, _, spec = family.small()
    found = named(family, module)
    assert sum(int(np.prod(shape)) for _, shape in found.values()) == 874_752
    assert {name: (leaf.shape, leaf.dtype, leaf.axes) for name, leaf in spec.items()} == {
        "inputs": ((16, 128), "int32", ("batch", "length")),
        "targets": ((16, 128), "int32", ("batch", "length")),
    }


@pytest.mark.newest
@BOTH
def test_weights_mask_tokens_exactly(family):
    module, loss, _ = family.small(**TINY)
    loss, params, batch = fast_jit(loss), params_of(family, module), tokens()
    weights = (np.random.RandomState(3).rand(2, 8) < 0.5).astype(np.float32)
    garbage = np.where(weights == 0, 0, batch["targets"]).astype(np.int32)
    masked = loss(params, {**batch, "weights": weights}, None)
    again = loss(params, {**batch, "targets": garbage, "weights": weights}, None)
    rest = loss(params, {**batch, "weights": 1 - weights}, None)
    every = loss(params, {**batch, "weights": np.ones_like(weights)}, None)
    assert masked.weight == weights.sum()
    assert (again.total, again.aux["accuracy"].total) == (masked.total, masked.aux["accuracy"].total)
    np.testing.assert_allclose(masked.total + rest.total, every.total, rtol=1e-6)


def test_the_loss_is_cross_entropy():
    logits, batch = np.random.RandomState(1).randn(2, 8, 32).astype(np.float32), tokens()
    result = fast_jit(language.token_loss)(logits, batch)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_probabilities, batch["targets"][..., None], axis=-1)
    np.testing.assert_allclose(result.total, expected.sum(), rtol=1e-6)
    assert result.weight == 16
    assert result.aux["accuracy"].value() == (np.argmax(logits, axis=-1) == batch["targets"]).mean()
    assert result.total.dtype == result.weight.dtype == jnp.float32


def test_the_loss_of_huge_logits_is_finite():
    result = fast_jit(language.token_loss)(1e30 * np.eye(32, dtype=np.float32)[None, :8], tokens(batch=1))
    assert np.isfinite(result.total)


def test_the_loss_of_logits_sharded_over_the_vocabulary_moves_no_logits():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    sharded, logits = place("data", None, "tensor"), np.random.RandomState(1).randn(4, 8, 32).astype(np.float32)
    batch = tokens(batch=4)
    function = jax.value_and_grad(lambda logits, batch: language.token_loss(logits, batch).total)
    run = fast_jit(function, in_shardings=(sharded, place("data")), out_shardings=(place(), sharded))
    program = run.lower(logits, batch).compile().as_text()
    results = re.findall(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(", program)
    assert {kind for _, kind in results} == {"all-reduce"}
    # Two sequences of eight per device: reduced over the vocabulary first, one number per token.
    assert set(re.findall(r"f32\[[\d,]*\]", " ".join(shape for shape, _ in results))) <= {"f32[2,8]", "f32[]"}
    np.testing.assert_allclose(run(logits, batch)[0], fast_jit(function)(logits, batch)[0], rtol=1e-6)


@BOTH
def test_dropout_follows_its_key(family):
    module, loss, _ = family.small(**TINY, dropout=0.5)
    params = params_of(family, module)
    total = fast_jit(lambda key: loss(params, tokens(), key).total)
    assert total(jax.random.key(1)) == total(jax.random.key(1))
    assert total(jax.random.key(1)) != total(jax.random.key(2))


@BOTH
def test_dropout_needs_a_key_and_a_rate(family):
    module, loss, _ = family.small(**TINY, dropout=0.5)
    never = family.small(**TINY)[1]
    params = params_of(family, module)
    program = lambda loss, key: str(jax.make_jaxpr(lambda params: loss(params, tokens(), key))(params))  # noqa: E731
    assert program(loss, None) == program(never, None) == program(never, jax.random.key(1))
    assert program(loss, jax.random.key(1)) != program(loss, None)


@BOTH
def test_every_dropout_site_of_every_layer_draws_its_own_mask(family):
    # Every update is a constant 2^k, k = 0..5 over 3 layers x 2 sites, dropped or doubled; the head shows the residual
    # stream up to one affine map. Independent masks make 64 levels, a shared pair at most 32.
    wide = 1024
    sizes = {**TINY, "embed": wide, "vocab": wide, "mlp": 4}
    module, _, _ = family.small(**sizes, dropout=0.5)
    values = {
        "attention/out/bias": np.array([1, 4, 16])[:, None],
        "mlp/down/bias": np.array([2, 8, 32])[:, None],
        "norm/scale": 1,
        "head/kernel": np.eye(wide),
    }

    def fill(path, shape):
        value = next((value for end, value in values.items() if path.endswith(end)), 0)
        return np.broadcast_to(np.asarray(value, np.float32), shape)

    tree = nn.meta.unbox(abstract(family, module))
    if family is gpt:
        params = jax.tree_util.tree_map_with_path(lambda path, leaf: fill(_text(path), leaf.shape), tree)
    else:
        flat = nnx.to_flat_state(tree)
        params = nnx.from_flat_state({path: leaf.replace(fill("/".join(path), leaf.shape)) for path, leaf in flat})
    logits = fast_jit(apply_of(family, module))(params, np.zeros((1, 1), np.int32), jax.random.key(0))
    assert len(np.unique(np.asarray(logits).round(3))) == 64


@BOTH
def test_remat_changes_no_gradient(family):
    results = []
    for remat in (False, True):
        module, loss, _ = family.small(**TINY, dropout=0.3, remat=remat)

        def value(params, loss=loss):
            return loss(params, tokens(), jax.random.key(5)).value()

        params = params_of(family, module)
        results.append(fast_jit(jax.grad(value))(params))
        assert ("prevent_cse" in str(jax.make_jaxpr(value)(params))) == remat
    assert close(*results, tolerance=1e-6)


@BOTH
def test_no_token_sees_a_later_one(family):
    module, _, _ = family.small(**TINY)
    run = functools.partial(fast_jit(apply_of(family, module)), params_of(family, module), key=None)
    ids = tokens()["inputs"]
    changed = ids.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    before, after = run(ids=ids), run(ids=changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


@pytest.mark.newest
@BOTH
def test_the_layers_are_one_scan(family):
    module, loss, _ = family.small(**TINY, dropout=0.1)
    params = params_of(family, module)
    jaxpr = jax.make_jaxpr(lambda params, key: loss(params, tokens(), key).total)(params, jax.random.key(0))
    (scan,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert scan.params["length"] == 3
    assert [out.aval.shape for out in scan.outvars] == [(2, 8, 16)]


@BOTH
def test_bfloat16_compute_keeps_float32_parameters(family):
    module, loss, _ = family.small(**TINY, dtype=jnp.bfloat16)
    params = params_of(family, module)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    result, exact = fast_jit(loss)(params, tokens(), None), fast_jit(family.small(**TINY)[1])(params, tokens(), None)
    assert result.total.dtype == jnp.float32
    assert result.total != exact.total
    np.testing.assert_allclose(result.total, exact.total, rtol=1e-2)


@BOTH
def test_a_sequence_longer_than_the_positions_is_refused(family):
    module, loss, _ = family.small(**TINY)
    long = tokens(length=9)
    with pytest.raises(ValueError, match="9 tokens exceeds the 8 learned positions"):
        loss(params_of(family, module), long, None)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="embed=16 is not divisible by heads=3"):
        gpt.small(**{**TINY, "heads": 3})
    with pytest.raises(ValueError, match=r"dropout=1 is not in \[0, 1\)"):
        gpt.small(dropout=1)
