"""Every array of an optimizer's state has a spec and a reason, for everything that optax builds; no devices here."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshes.shape import MeshShape
from shardlib.explanation import entries_bytes, tree_bytes
from shardlib.optimizer_specs import abstract_state, optimizer_specs, raw_updates, resolve_state
from shardlib.state_dims import factored_dims, origins
from tests.optimizers import ALL

ROOT = Path(__file__).parents[2]
MESH = "fsdp=4,tensor=2"
SHAPES = {"b": (64,), "stack": (4, 16, 64), "w": (16, 64)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
SPECS = {"b": P("tensor"), "stack": P(None, "fsdp", "tensor"), "w": P("fsdp", "tensor")}
NAMES = [("mlp",), ("layers", "embed", "mlp"), ("embed", "mlp")]


def is_spec(node):
    return isinstance(node, P)


def found(optimizer, params=PARAMS, specs=SPECS):
    return resolve_state(optimizer, params, specs, mesh=MESH)


def by_path(optimizer, params=PARAMS, specs=SPECS):
    return {entry.path: entry for entry in found(optimizer, params, specs).entries}


@pytest.mark.parametrize("name", ALL)
def test_every_array_has_a_spec_that_fits_and_a_reason(name):
    optimizer = ALL[name]
    state = abstract_state(optimizer, PARAMS)
    result = found(optimizer)
    assert jax.tree.structure(result.specs, is_leaf=is_spec) == jax.tree.structure(state)
    assert optimizer_specs(optimizer, PARAMS, SPECS) == result.specs
    assert len(result.entries) == len(jax.tree.leaves(state))
    for entry, leaf in zip(result.entries, jax.tree.leaves(state), strict=True):
        assert entry.shape == leaf.shape and entry.reason and len(entry.decisions) == len(leaf.shape)
        assert len(entry.spec) <= len(entry.shape)
        for decision in entry.decisions:
            assert decision.reason
            assert decision.size % {(): 1, ("fsdp",): 4, ("tensor",): 2}[decision.mesh_axes] == 0
        if entry.shape in SHAPES.values():
            assert entry.spec == next(SPECS[key] for key, shape in SHAPES.items() if shape == entry.shape)
        if entry.shape == ():
            assert entry.spec == P()
    assert entries_bytes(result.entries) == tree_bytes(state, result.specs, MeshShape.parse(MESH))


@pytest.mark.newest
def test_names_and_reasons_say_where_a_spec_comes_from():
    result = resolve_state(ALL["adafactor"], PARAMS, SPECS, mesh=MESH, names=NAMES)
    row, whole, placeholder, count = (
        next(entry for entry in result.entries if entry.path.endswith(path))
        for path in ("v_row/stack", "v/b", "v/w", "0/count")
    )
    assert (row.names, row.spec, row.follows) == (("layers", "embed"), P(None, "fsdp"), "stack")
    assert [decision.reason for decision in row.decisions] == [
        "dim 0, averaged over dim 2 of stack",
        "dim 1, averaged over dim 2 of stack",
    ]
    assert (whole.names, whole.spec, whole.reason) == (("mlp",), P("tensor"), "follows b")
    assert (placeholder.spec, placeholder.decisions[0].reason) == (P(), "a placeholder of w")
    assert (count.spec, count.follows, count.reason) == (P(), None, "a scalar: replicated")
    assert row.bytes_per_device == 4 * 16 * 4 // 4


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((16, 64), P("x"), P("y")),
        ((64, 16), P("y"), P("x")),
        ((32, 32), P("x"), P("y")),
        ((4, 32, 32), P("z", "x"), P("z", "y")),
        ((32, 8, 32), P("z", "x"), P("x", "y")),
        ((32, 32, 32), P("z", "x"), P("z", "y")),
        ((64, 4, 16), P("x", "y"), P("z", "x")),
    ],
)
def test_factored_statistics_keep_the_right_dims(shape, rows, columns):
    axes = ("x", "y") if len(shape) == 2 else ("z", "x", "y")
    params, specs = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}, {"w": P(*axes)}
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    state = optimizer_specs(optimizer, params, specs)
    assert (state.v_row["w"], state.v_col["w"], state.v["w"]) == (rows, columns, P())
    # The oracle: sizes made unequal without a change of order tell the kept dims apart.
    apart = tuple(2 * size + dim for dim, size in enumerate(shape))
    real = jax.eval_shape(optimizer.init, {"w": jax.ShapeDtypeStruct(apart, jnp.float32)})
    for spec, leaf in ((rows, real.v_row["w"]), (columns, real.v_col["w"])):
        assert tuple(axes[apart.index(size)] for size in leaf.shape) == tuple(spec)


def test_the_test_of_factored_dims_sees_them_swapped(monkeypatch):
    monkeypatch.setattr("shardlib.optimizer_specs.factored_dims", lambda shape: factored_dims(shape)[::-1])
    with pytest.raises(AssertionError):
        test_factored_statistics_keep_the_right_dims((32, 32), P("x"), P("y"))


def test_origins_of_statistics_of_other_transforms():
    candidates = lambda state, parameter: [origin.candidates for origin in origins(state, parameter)]  # noqa: E731
    assert candidates((16, 64), (16, 64)) == [(0,), (1,)]
    assert candidates((1, 64), (64, 64)) == [(), (1,)]  # an average that keeps its dim
    assert candidates((8, 16, 64), (16, 64)) == [(), (0,), (1,)]  # a memory of eight
    assert candidates((16, 64, 8), (16, 64)) == [(0,), (1,), ()]
    assert candidates((64,), (16, 64)) == [(1,)]
    assert candidates((64,), (64, 64)) == [(0, 1)]  # either
    assert candidates((16, 8), (16, 64)) == [(0,), ()]  # a projection to rank 8
    assert candidates((3,), (16, 64)) == [()]
    assert factored_dims((64,)) is None


def test_a_dim_that_may_be_either_of_two_stays_whole_with_a_notice():
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    result = found(optax.sm3(1e-3), params, {"w": P("fsdp", "tensor")})
    row = next(entry for entry in result.entries if entry.path.endswith("mu/w/0"))
    assert row.spec == P()
    assert "size 64 is dim 0 or 1 of [64, 64], which have other specs: whole" in row.decisions[0].reason
    assert any("mu/w/0 [64]" in notice and "256 bytes" in notice for notice in result.notices)
    assert not found(optax.sm3(1e-3), params, {"w": P(None, None)}).notices


def test_a_parameter_without_a_path_and_a_spec_shorter_than_the_rank():
    params = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    state = optimizer_specs(optax.adam(1e-3), params, P("fsdp"))
    assert state[0].mu == state[0].nu == P("fsdp")
    (entry,) = found(optax.sgd(0.1, momentum=0.9), params, P("fsdp")).entries
    assert entry.num_shards == 4


def test_paths_that_end_alike_are_not_confused():
    params = {"a": {"w": PARAMS["w"]}, "w": PARAMS["w"], "mu": {"w": PARAMS["w"]}}
    specs = {"a": {"w": P("fsdp", None)}, "w": P("tensor", None), "mu": {"w": P(None, "tensor")}}
    state = optimizer_specs(optax.adam(1e-3), params, specs)
    assert state[0].mu == state[0].nu == specs
    fallback = optimizer_specs(optax.chain(optax.adam(1e-3), listed()), params, specs)
    assert fallback[0][0].mu == fallback[0][0].nu == specs


def listed():
    """A transform that keeps its moments in a flat list, which optax's map cannot follow."""

    def init(params):
        return {"count": jnp.zeros((), jnp.int32), "moments": [jnp.zeros_like(x) for x in jax.tree.leaves(params)]}

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def test_moments_without_a_path_follow_by_shape_or_are_replicated_with_a_notice():
    entries = by_path(listed())
    assert [entries[f"moments/{i}"].spec for i in range(3)] == list(SPECS.values())
    assert "by shape (optax's map failed with" in entries["moments/2"].reason
    assert (entries["count"].spec, entries["count"].reason) == (P(), "a scalar: replicated")
    params = {"v": PARAMS["w"], "w": PARAMS["w"]}
    result = found(listed(), params, {"v": P("tensor", "fsdp"), "w": SPECS["w"]})
    assert [entry.spec for entry in result.entries] == [P(), P(), P()]
    assert sum("2 parameters have this shape and other specs" in notice for notice in result.notices) == 2


def test_transforms_that_index_the_parameters_are_followed_by_path():
    """An optimizer per part of the model, written by hand: optax's placeholder has no such part."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    parts = optax.GradientTransformation(
        lambda params: {name: factored.init(params[name]) for name in ("head", "trunk")}, lambda u, s, p=None: (u, s)
    )
    params = {"head": {"w": PARAMS["w"]}, "trunk": {"w": PARAMS["w"]}}
    specs = {"head": {"w": P("tensor", "fsdp")}, "trunk": {"w": P("fsdp", "tensor")}}
    state = optimizer_specs(parts, params, specs)
    assert (state["head"].v_row["w"], state["head"].v_col["w"]) == (P("tensor"), P("fsdp"))
    assert (state["trunk"].v_row["w"], state["trunk"].v_col["w"]) == (P("fsdp"), P("tensor"))


def test_nnx_states_are_followed_through_their_variables():
    module = nnx.eval_shape(lambda: nnx.Linear(16, 64, rngs=nnx.Rngs(0)))
    params = nnx.state(module, nnx.Param)
    specs = jax.tree.map(lambda leaf: P("fsdp", "tensor") if leaf.ndim == 2 else P("tensor"), params)
    result = found(ALL["multi_transform"], params, specs)
    assert jax.tree.structure(result.specs, is_leaf=is_spec) == jax.tree.structure(
        abstract_state(ALL["multi_transform"], params)
    )
    followed = {entry.path: entry.spec for entry in result.entries if entry.follows}
    assert sorted(followed.values(), key=str) == [P("fsdp", "tensor"), P("fsdp", "tensor"), P("tensor")], followed


def test_raw_updates_are_found_in_whole_and_partial_masks_only():
    only_w = {"b": False, "stack": False, "w": True}
    assert raw_updates(optax.masked(optax.adam(1e-3), only_w), PARAMS) == ("b", "stack")
    decay = optax.masked(optax.add_decayed_weights(0.1), only_w)
    assert raw_updates(optax.chain(decay, optax.sgd(0.1)), PARAMS) == ()
    assert raw_updates(optax.adamw(1e-3, mask=only_w), PARAMS) == ()
    assert raw_updates(optax.contrib.muon(1e-3), PARAMS) == ()
    needs_value = optax.chain(optax.masked(optax.sgd(0.1), only_w), optax.polyak_sgd())
    assert raw_updates(needs_value, PARAMS) == ()


def test_nothing_is_allocated_and_no_device_is_asked():
    code = """
import jax, optax
from jax.sharding import PartitionSpec as P
from jax._src import xla_bridge
from shardlib.optimizer_specs import resolve_state
from tests.optimizers import ALL
huge = {"b": jax.ShapeDtypeStruct((1 << 20,), "float32"), "w": jax.ShapeDtypeStruct((1 << 20, 1 << 20), "float32")}
for name, optimizer in ALL.items():
    assert resolve_state(optimizer, huge, {"b": P(), "w": P("fsdp", None)}, mesh="fsdp=4").entries or name == "sgd"
    assert not xla_bridge.backends_are_initialized(), name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
