"""Field troubles, group RNG: the same values on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes import ShardingError
from shardlib import annotate
from tests.cases.test_rul import small_model
from tests.moving import compiled
from tests.tiny import rows, stepped, weight


@pytest.mark.newest
def test_rng_03_initial_values_do_not_depend_on_the_layout():
    draws = []
    for count in (1, 2, 4, 8):
        sharding = jax.NamedSharding(sl.make_mesh(f"data={count}"), P("data"))
        draw = jax.jit(lambda key: jax.random.normal(key, (496, 3)), out_shardings=sharding)
        draws.append(np.asarray(draw(jax.random.key(0))))
    assert all(np.array_equal(draw, draws[0]) for draw in draws)
    model, loss, spec = small_model()
    states = []
    for mesh in ("data=1", "data=8", "tensor=8", "data=2,tensor=4"):
        trainer = sl.Trainer(sl.bind(model, loss, sl.Plan(mesh=mesh), spec), optax.sgd(0.1))
        states.append(jax.tree.map(np.asarray, trainer.init(jax.random.key(0)).params))
    for state in states:
        assert jax.tree.all(jax.tree.map(np.array_equal, state, states[0]))


def mask_loss(params, batch, rng):
    """A sum whose gradient by row i of each parameter is the mask of row i of the batch: 0, or 2 where it is kept."""
    total, keys = 0.0, None if rng is None else dict(zip(sorted(params), jax.random.split(rng, len(params))))
    for name, w in params.items():
        y = sl.constrain(batch["row"] @ w.get_value(), "batch", "mlp" if name == "hidden" else None)
        kept = 1.0 if keys is None else 2.0 * jax.random.bernoulli(keys[name], 0.5, y.shape)
        total += (y * kept).sum()
    return sl.Loss(total=total, weight=None)


def masks(num_rows=8, hidden=False, **plan):
    """The masks that one step of a plan draws for its rows, by parameter; placed as the parameters are."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.residual = nnx.Param(jnp.zeros((num_rows, 16)), logical_axes=(None, None))
            if hidden:
                self.hidden = nnx.Param(jnp.zeros((num_rows, 32)), logical_axes=(None, "mlp"))

    batch = {"row": np.eye(num_rows, dtype=np.float32)}
    state, _ = stepped(mask_loss, batch, model=Model, **plan)
    return {name: -leaf.get_value() for name, leaf in state.params.items()}


def distinct(arrays):
    return len({np.asarray(array).tobytes() for array in arrays})


def check_shards_draw_their_own(**plan):
    """RNG-2: eight shards of one row each have eight masks."""
    assert distinct(masks(**plan)["residual"]) == 8


def test_rng_01_masks_on_a_mesh_of_data_and_tensor():
    found = masks(16, hidden=True, mesh="data=2,tensor=2", lowering="explicit")
    # On every device: its rows of a copied activation, its rows and columns of a split one.
    residual = [shard.data[8 * row :][:8] for row in range(2) for shard in found["residual"].addressable_shards]
    hidden = [shard.data[8 * row :][:8] for row in range(2) for shard in found["hidden"].addressable_shards]
    assert (distinct(residual), distinct(hidden)) == (2, 4)
    assert {float(kept) for kept in np.unique(found["hidden"])} == {0.0, 2.0}


@pytest.mark.newest
def test_rng_02_every_shard_has_its_own_mask():
    check_shards_draw_their_own(mesh="data=8", lowering="explicit")


@pytest.mark.newest
def test_rng_02_slices_fix_the_masks_for_every_layout():
    layouts = [
        {"mesh": "data=1", "lowering": "automatic"},
        {"mesh": "data=8", "lowering": "automatic"},
        {"mesh": "data=8", "lowering": "explicit"},
        {"mesh": "data=2,tensor=2", "lowering": "explicit", "num_microbatches": 2},
        {"mesh": "fsdp=2", "lowering": "automatic", "num_microbatches": 2},
    ]
    wanted, *others = [np.asarray(masks(random_slices=8, **layout)["residual"]) for layout in layouts]
    assert distinct(wanted) == 8
    for layout, found in zip(layouts[1:], others, strict=True):
        assert np.array_equal(found, wanted), layout


def test_rng_04_other_generators_are_refused_or_named():
    model, loss, spec = small_model()
    with pytest.raises(ShardingError) as caught:
        sl.Trainer(sl.bind(model, loss, sl.Plan(mesh="data=8"), spec), optax.sgd(0.1)).init(
            jax.random.key(0, impl="rbg")
        )
    text = str(caught.value)
    assert "is key<rbg>[], not one typed key key<fry>" in text
    assert "may draw other values on other layouts" in text
    assert not [line for line in sl.bind(model, loss, sl.Plan(mesh="data=8"), spec).notices if "key<" in line]
    with jax.default_prng_impl("rbg"):
        notices = sl.bind(model, loss, sl.Plan(mesh="data=8"), spec).notices
    assert [line for line in notices if line.startswith("keys are key<rbg>")]
    # What the notice is about: drawing row by row on each device is not drawing all rows at once.
    equal = {}
    for impl in ("threefry2x32", "rbg"):
        keys = jax.random.split(jax.random.key(0, impl=impl), 8)
        draw = jax.vmap(lambda key: jax.random.normal(key, (4,)))
        mesh = sl.make_mesh("data=8")
        split = jax.shard_map(draw, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        equal[impl] = np.array_equal(draw(keys), jax.jit(split)(keys))
    assert equal == {"threefry2x32": True, "rbg": False}


def test_rng_05_the_spread_comes_from_the_whole_shape():
    """Xavier: sqrt(2 / (4096 + 32)) = 0.0220 also where each device holds 1024 of 4096 rows."""

    class Adapter(nnx.Module):
        def __init__(self, rngs):
            init = annotate.nnx_logical(nnx.initializers.xavier_normal(), "mlp", "embed")
            self.a = nnx.Param(init(rngs.params(), (4096, 32)), logical_axes=("mlp", "embed"))

    loss = lambda params, batch, rng: (params["a"][:2] * batch["x"]).mean()  # noqa: E731
    spec = {"x": sl.ArraySpec(shape=(2, 32), dtype="float32", axes=(None, None))}
    values = []
    for mesh in ("tensor=1", "tensor=4"):
        state = sl.Trainer(sl.bind(Adapter, loss, sl.Plan(mesh=mesh), spec), optax.sgd(0.1)).init(jax.random.key(0))
        values.append(np.asarray(state.params["a"].get_value()))
    assert {shard.data.shape for shard in state.params["a"].get_value().addressable_shards} == {(1024, 32)}
    assert np.array_equal(*values)
    np.testing.assert_allclose(values[0].std(), np.sqrt(2 / (4096 + 32)), rtol=0.02)


@pytest.mark.parametrize("lowering", ["automatic", "explicit"])
def test_rng_09_random_bits_move_nothing(lowering):
    def moved(rate):
        def loss(params, batch, rng):
            x = sl.constrain(batch["x"] @ params["w"].get_value(), "batch", None)
            kept = jax.random.bernoulli(rng, 1 - rate, x.shape) if rate else jnp.ones(x.shape, bool)
            return jnp.square(jnp.where(kept, x, 0)).mean()

        bound = sl.bind(weight(np.eye(256), None, None), loss, sl.Plan(mesh="data=8", lowering=lowering), spec)
        program = compiled(sl.Trainer(bound, optax.sgd(1.0)).lowered)
        return [(one.kind, one.operands, one.groups, one.loop_depth) for one in program.collectives]

    spec = {"x": rows(64, 256)}
    assert moved(0.5) == moved(0.0) != []
