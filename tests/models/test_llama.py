"""The Llama on one device: rotary positions, grouped queries, published sizes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import llama
from shardlib.annotate import METADATA_KEY

TINY = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "mlp": 24, "vocab": 32, "length": 8, "batch": 2}
NAMES = {
    "embed/embedding": ("vocab", "embed"),
    "head/kernel": ("embed", "vocab"),
    "norm/scale": ("embed",),
    "layers/attention_norm/scale": ("layers", "embed"),
    "layers/attention/query/kernel": ("layers", "embed", "heads", "head_dim"),
    "layers/attention/key/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention/value/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention/out/kernel": ("layers", "heads", "head_dim", "embed"),
    "layers/mlp_norm/scale": ("layers", "embed"),
    "layers/mlp/gate/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/up/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/down/kernel": ("layers", "mlp", "embed"),
}
IDS = np.random.RandomState(0).randint(0, 32, (2, 9)).astype(np.int32)
# These programs run once: compiling them is the cost.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
BATCH = {"inputs": IDS[:, :-1], "targets": IDS[:, 1:]}


def abstract(factory):
    return nnx.split(nnx.eval_shape(lambda: factory(nnx.Rngs(0))))


def made(factory, seed=0):
    """Random parameters, without compiling an init."""
    draw = np.random.RandomState(seed)
    return jax.tree.map(lambda leaf: (0.3 * draw.standard_normal(leaf.shape)).astype(leaf.dtype), abstract(factory)[1])


def flat(state):
    return {"/".join(path): variable for path, variable in nnx.to_flat_state(state)}


@pytest.mark.parametrize("options", [{}, {"tied": True}], ids=["plain", "tied"])
def test_every_parameter_is_named(options):
    found = flat(abstract(llama.tiny(**TINY, **options)[0])[1])
    expected = {path: names for path, names in NAMES.items() if not options or path != "head/kernel"}
    assert {path: variable.get_metadata()[METADATA_KEY] for path, variable in found.items()} == expected
    assert all(len(variable.shape) == len(NAMES[path]) for path, variable in found.items())


@pytest.mark.parametrize(
    ("name", "billions", "count"),
    [("llama_8b", 8.03, 8_030_261_248), ("llama_70b", 70.6, 70_553_706_496), ("llama_405b", 405.9, 405_853_388_800)],
)
def test_published_sizes_and_nothing_allocated(name, billions, count):
    before = jax.live_arrays()  # kept, so that none of them can be collected meanwhile
    factory, loss, spec = getattr(llama, name)()
    state = abstract(factory)[1]
    assert sum(math.prod(variable.shape) for variable in flat(state).values()) == count
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)
    result = jax.eval_shape(loss, state, {key: leaf.abstract() for key, leaf in spec.items()}, None)
    assert result.total.shape == ()
    assert {id(array) for array in jax.live_arrays()} <= {id(array) for array in before}


def test_rotation_depends_on_the_distance_only():
    table = llama.rotary_table(12, 8, theta=100.0)
    query, key = np.random.RandomState(1).randn(2, 8).astype(np.float32)
    turned = [llama.rotate(jnp.broadcast_to(vector, (1, 12, 1, 8)), table)[0, :, 0] for vector in (query, key)]
    scores = np.einsum("iq,jq->ij", *turned)
    for distance in range(-11, 12):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), rtol=1e-4, atol=1e-4)
    assert np.ptp(scores[0]) > 0.1
    np.testing.assert_allclose(scores[0, 0], query @ key, rtol=1e-5)


def test_rotation_is_the_published_matrix():
    angle = 3 * 100.0 ** (-2 / 4)  # position 3, second of two frequencies
    x = np.zeros((1, 4, 1, 4), np.float32)
    x[0, 3, 0, 1] = 1
    turned = np.asarray(llama.rotate(jnp.asarray(x), llama.rotary_table(4, 4, theta=100.0)))[0, 3, 0]
    np.testing.assert_allclose(turned, [0, math.cos(angle), 0, math.sin(angle)], atol=1e-6)


@pytest.mark.newest
def test_grouped_queries_equal_repeated_heads():
    factory, loss, _ = llama.tiny(**TINY)
    repeated_factory, repeated_loss, _ = llama.tiny(**{**TINY, "kv_heads": 4})
    params = made(factory)
    wide = {}
    for path, variable in nnx.to_flat_state(params):
        kv = path[-2] in ("key", "value")
        wide[path] = variable.replace(np.repeat(variable[...], 2, axis=2)) if kv else variable
    repeated = nnx.from_flat_state(wide)
    assert jax.tree.map(jnp.shape, repeated) == jax.tree.map(jnp.shape, made(repeated_factory))
    with jax.numpy_dtype_promotion("strict"):
        total = fast_jit(loss)(params, BATCH, None).total
        expected = fast_jit(repeated_loss)(repeated, BATCH, None).total
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_no_token_sees_a_later_one():
    factory, _, _ = llama.tiny(**TINY)
    graphdef, params = abstract(factory)[0], made(factory)
    run = fast_jit(lambda ids: nnx.merge(graphdef, params)(ids))
    changed = BATCH["inputs"].copy()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    before, after = run(BATCH["inputs"]), run(changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


@pytest.mark.parametrize("remat", [False, True])
def test_remat_wraps_the_layer(remat):
    factory, loss, _ = llama.tiny(**TINY, remat=remat)
    jaxpr = jax.make_jaxpr(lambda params: loss(params, BATCH, None).total)(abstract(factory)[1])
    (scan,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert ("prevent_cse" in str(scan.params["jaxpr"])) == remat


def test_the_layers_are_one_scan_with_the_rotary_table_outside():
    factory, loss, _ = llama.tiny(**TINY)
    params = abstract(factory)[1]
    jaxpr = jax.make_jaxpr(lambda params: loss(params, BATCH, None).total)(params)
    (scan,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert [out.aval.shape for out in scan.outvars] == [(2, 8, 16)]
    assert not {"cos", "sin"} & {equation.primitive.name for equation in scan.params["jaxpr"].jaxpr.eqns}


def test_the_state_is_parameters_only():
    state = abstract(llama.tiny(**TINY)[0])[1]
    assert {type(variable) for variable in flat(state).values()} == {nnx.Param}


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="heads=4 is not a multiple of kv_heads=3"):
        llama.tiny(kv_heads=3)
    with pytest.raises(ValueError, match="embed=12 does not split into heads=4 of an even size"):
        llama.tiny(embed=12)
