"""Field troubles, group OPT, the ones about the state itself: factored, masked, grouped, accumulated, custom."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib import annotate
from shardlib.optimizer_specs import resolve_state
from shardlib.specs import resolve
from shardlib.trainable import freeze
from shardlib.tree_paths import leaves_with_paths
from tests.optimizers import ALL, matrices

FSDP_TENSOR = "fsdp=4,tensor=2"


def is_spec(node):
    return isinstance(node, P)


def normal(shapes):
    draw = np.random.default_rng(0).normal
    return {name: draw(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run(loss, optimizer, params, specs, mesh, *, steps, check=lambda state: None):
    """Parameters after some steps on a mesh whose results are pinned; `check` sees each optimizer state."""
    result = resolve_state(optimizer, jax.eval_shape(lambda: params), specs, mesh=mesh)
    where = sl.shardings((specs, result.specs), mesh)

    def step(params, state, number):
        updates, state = optimizer.update(jax.grad(loss)(params, number), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, in_shardings=(*where, None), out_shardings=where, donate_argnums=(0, 1))
    params = jax.device_put(params, where[0])
    state = jax.jit(optimizer.init, out_shardings=where[1])(params)
    check(state)
    for number in range(steps):
        params, state = step(params, state, number)
        check(state)
    assert step._cache_size() == 1
    return params


def agree(sharded, single, *, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.abs(b).max()))


def alone(loss, optimizer, params, *, steps):
    """The oracle: the same steps on one device."""

    def step(params, state, number):
        updates, state = optimizer.update(jax.grad(loss)(params, number), state, params)
        return optax.apply_updates(params, updates), state

    step, state = jax.jit(step), optimizer.init(params)
    for number in range(steps):
        params, state = step(params, state, number)
    return params


@jax.tree_util.register_pytree_node_class
class Noted:
    """State with moments and a static number that depends on what it was made for, as a custom transform keeps it."""

    def __init__(self, moments, note):
        self.moments, self.note = moments, note

    def tree_flatten(self):
        return (self.moments,), self.note

    @classmethod
    def tree_unflatten(cls, note, children):
        return cls(children[0], note)


def noted():
    def init(params):
        size = float(sum(leaf.size for leaf in jax.tree.leaves(params)))
        return Noted({"count": jnp.zeros((), jnp.int32), "average": jax.tree.map(jnp.zeros_like, params)}, size)

    def update(updates, state, params=None):
        average = jax.tree.map(lambda a, g: 0.9 * a + g, state.moments["average"], updates)
        moments = {"count": state.moments["count"] + 1, "average": average}
        return jax.tree.map(lambda a: -0.1 * a, average), Noted(moments, state.note)

    return optax.GradientTransformation(init, update)


def square(params, number):
    return sum(jnp.sum((leaf - number) ** 2) for leaf in jax.tree.leaves(params))


@pytest.mark.newest
def test_opt_05_state_with_static_data():
    params = normal({"w": (16, 8), "b": (8,)})
    specs, mesh = {"b": P(), "w": P("fsdp")}, sl.make_mesh("fsdp=8")
    result = resolve_state(optax.chain(noted(), optax.scale(0.5)), params, specs, mesh=mesh)
    assert result.specs[0].moments == {"count": P(), "average": specs}
    entry = next(entry for entry in result.entries if entry.path.endswith("average/w"))
    assert entry.reason == "follows w by path (optax's map failed with ValueError)"
    params_after = run(square, noted(), params, specs, mesh, steps=2)
    agree(params_after, alone(square, noted(), params, steps=2))


FACTORED = {"bias": (256,), "square": (64, 64), "stack": (4, 128, 256), "w": (128, 256)}
FACTORED_SPECS = {"bias": P("b"), "square": P("a", "b"), "stack": P(None, "a", "b"), "w": P("a", "b")}


def test_opt_06_factored_moments():
    optimizer, mesh = optax.adafactor(1e-2), sl.make_mesh("a=4,b=2")
    params = normal(FACTORED)
    result = resolve_state(optimizer, params, FACTORED_SPECS, mesh=mesh)
    factored = result.specs[0]
    assert factored.v_row == {"bias": P(), "square": P(), "stack": P(None, "a"), "w": P("a")}
    assert factored.v_col == {"bias": P(), "square": P(), "stack": P(None, "b"), "w": P("b")}
    assert factored.v == {"bias": P("b"), "square": P("a", "b"), "stack": P(), "w": P()}
    held = {entry.path.split("/", 1)[1]: entry.bytes_per_device for entry in result.entries if "v_" in entry.path}
    assert (held["v_row/w"], held["v_col/w"]) == (128 // 4 * 4, 256 // 2 * 4)
    assert (held["v_row/stack"], held["v_col/stack"]) == (4 * 128 // 4 * 4, 4 * 256 // 2 * 4)
    after = run(square, optimizer, params, FACTORED_SPECS, mesh, steps=3)
    agree(after, alone(square, optimizer, params, steps=3))


def test_opt_07_a_new_name_needs_no_factor_table():
    leaf = annotate.LogicalAxes(jax.ShapeDtypeStruct((128, 128), jnp.float32), ("embed", "relpos"))
    rules = sl.Rules.parse(["embed -> fsdp", "relpos -> tensor"])
    specs = resolve({"bias": leaf}, rules, FSDP_TENSOR).specs
    params = {"bias": leaf.value}
    state = resolve_state(optax.adafactor(1e-2), params, specs, mesh=FSDP_TENSOR, names=[("embed", "relpos")])
    assert [(e.names, e.spec) for e in state.entries if "v_col" in e.path] == [(("relpos",), P("tensor"))]
    with pytest.raises(sl.ShardingError, match="no rule names the logical axis 'relpos'"):
        resolve({"bias": leaf}, sl.default_rules(), FSDP_TENSOR)


def test_opt_08_a_mask_does_not_freeze():
    params = {"a": jnp.ones((4, 4)), "b": jnp.array([1.0, -0.0, 0.0, 3.0])}
    ones, mask = jax.tree.map(jnp.ones_like, params), {"a": True, "b": False}
    specs = jax.tree.map(lambda leaf: P(), params)

    def updated(optimizer):
        updates, _ = optimizer.update(ones, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    masked, frozen = optax.masked(optax.sgd(0.1), mask), freeze(optax.sgd(0.1), mask)
    np.testing.assert_array_equal(updated(masked)["b"], params["b"] + 1.0)
    (notice,) = resolve_state(masked, params, specs, mesh="fsdp=4").notices
    assert "the optimizer adds the raw gradient to b: " in notice and "trainable.freeze(optimizer, mask)" in notice
    assert updated(frozen)["b"].tobytes() == params["b"].tobytes()
    np.testing.assert_allclose(updated(frozen)["a"], 0.9)
    assert not resolve_state(frozen, params, specs, mesh="fsdp=4").notices


def test_opt_09_nested_masks():
    optimizer = optax.masked(optax.masked(optax.adam(1e-2), matrices), {"a": True, "b": False})
    params, specs = normal({"a": (8, 8), "b": (8,)}), {"a": P("fsdp"), "b": P("fsdp")}
    mesh = sl.make_mesh("fsdp=8")
    result = resolve_state(optimizer, params, specs, mesh=mesh)
    structure = jax.tree.structure(jax.eval_shape(optimizer.init, params))
    assert jax.tree.structure(result.specs, is_leaf=is_spec) == structure
    adam = result.specs.inner_state.inner_state[0]
    assert adam.mu == adam.nu == {"a": P("fsdp"), "b": optax.MaskedNode()}
    run(square, optimizer, params, specs, mesh, steps=1)


def test_opt_10_groups_by_label():
    dense = partial(
        nnx.Linear,
        8,
        16,
        kernel_init=annotate.nnx_logical(nnx.initializers.lecun_normal(), "embed", "mlp"),
        bias_init=annotate.nnx_logical(nnx.initializers.zeros, "mlp"),
    )
    factory = lambda rngs: dense(rngs=rngs)  # noqa: E731
    module = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))
    graphdef, params = nnx.split(module)

    def loss(params, batch, rng):
        return jnp.mean(nnx.merge(graphdef, params)(batch["x"]) ** 2)

    labels = jax.tree.map(lambda leaf: "kernel" if len(leaf.shape) == 2 else "bias", params)
    optimizer = optax.multi_transform({"kernel": optax.adam(1e-2), "bias": optax.sgd(0.1, momentum=0.9)}, labels)
    spec = {"x": sl.ArraySpec(shape=(8, 8), dtype="float32", axes=("batch", None))}
    trainer = sl.Trainer(sl.bind(factory, loss, sl.Plan(mesh="data=2,tensor=4"), spec), optimizer)
    state = trainer.init(jax.random.key(0))
    for _ in range(2):
        state, _ = trainer.step(state, {"x": np.ones((8, 8), np.float32)})
    moments = [(path, leaf) for path, leaf in leaves_with_paths(state.opt_state) if leaf.ndim]
    assert [path.split("/")[-1] for path, _ in moments] == ["bias", "kernel", "kernel"]
    assert [leaf.sharding.spec for _, leaf in moments] == [P("tensor"), P(None, "tensor"), P(None, "tensor")]


def test_opt_11_accumulator_bytes():
    optimizer, mesh = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=4), sl.make_mesh("fsdp=8")
    params, specs = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}, {"w": P("fsdp")}
    result = resolve_state(optimizer, params, specs, mesh=mesh)
    (entry,) = (entry for entry in result.entries if "acc_grads" in entry.path)
    where = sl.shardings(result.specs, mesh)
    state = jax.jit(optimizer.init, out_shardings=where)({"w": jnp.zeros((256, 256))})
    (held,) = {shard.data.nbytes for shard in state.acc_grads["w"].addressable_shards}
    assert held == entry.bytes_per_device == 256 * 256 * 4 // 8


def test_opt_13_a_tied_embedding_has_one_state():
    params = normal({"embedding": (16, 8), "hidden": (8, 8)})
    specs, mesh = {"embedding": P("tensor", "fsdp"), "hidden": P("fsdp", "tensor")}, sl.make_mesh(FSDP_TENSOR)
    optimizer = optax.multi_transform(
        {"muon": optax.contrib.muon(1e-2), "adam": optax.adam(1e-2, eps=1e-3)}, {"embedding": "adam", "hidden": "muon"}
    )

    def loss(params, number):  # used twice: on the way in and, transposed, on the way out
        hidden = jax.nn.one_hot(jnp.arange(16), 16) @ params["embedding"] @ params["hidden"]
        return jnp.mean((hidden @ params["embedding"].T - jnp.roll(jnp.eye(16), number, 0)) ** 2)

    result = resolve_state(optimizer, params, specs, mesh=mesh)
    followed = sorted(entry.path for entry in result.entries if entry.follows == "embedding")
    assert [path.split("/")[1:2] + path.split("/")[-2:] for path in followed] == [
        ["adam", "mu", "embedding"],
        ["adam", "nu", "embedding"],
    ]
    after = run(loss, optimizer, params, specs, mesh, steps=5)
    agree(after, alone(loss, optimizer, params, steps=5), tolerance=1e-4)


MLP = {"b": (32,), "down": (32, 16), "up": (16, 32)}
MLP_SPECS = {"b": P("tensor"), "down": P("tensor", "fsdp"), "up": P("fsdp", "tensor")}
MATRIX, VECTOR = 2 * 16 * 32 * 4 // 8, 32 * 4 // 2  # bytes per device of both matrices, and of the bias
WHOLE = MATRIX + VECTOR
STATE_BYTES = {
    "adam": 2 * WHOLE + 4,
    "adamw": 2 * WHOLE + 4,
    # Rows and columns of the two matrices: (16,) over fsdp=4 and (32,) over tensor=2; whole v of the bias, its two
    # placeholders and those of two matrices, and the counter of the decay.
    "adafactor": 2 * (16 // 4 + 32 // 2) * 4 + VECTOR + 2 * 4 + 2 * 4 + 4,
    "lion": WHOLE + 4,
    "lamb": 2 * WHOLE + 4,
    "momentum": WHOLE,
    "schedule_free": 3 * WHOLE + 5 * 4,
    "muon": MATRIX + 2 * VECTOR + 3 * 4 + 2 * 4,
    "multisteps": 3 * WHOLE + 3 * 4,
    "inject_hyperparams": 2 * WHOLE + 9 * 4,
    "apply_if_finite": 2 * WHOLE + 4 + 2 * 4 + 1,
    "multi_transform": 2 * MATRIX + VECTOR + 4,
}
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def mlp(params, number):
    hidden = jnp.tanh(X @ params["up"] + params["b"][None])
    return jnp.mean((hidden @ params["down"] - jnp.roll(X, number, 0)) ** 2)


@pytest.mark.parametrize("name", STATE_BYTES)
def test_state_bytes_equal_the_closed_form(name):
    result = resolve_state(ALL[name], normal(MLP), MLP_SPECS, mesh=FSDP_TENSOR)
    assert sum(entry.bytes_per_device for entry in result.entries) == STATE_BYTES[name]


RUN = ("adamw", "adafactor", "lion", "lamb", "momentum", "schedule_free", "muon", "multisteps")


@pytest.fixture(scope="module")
def trained():
    """All of RUN for three steps, on the mesh and on one device, each in one program; and the states on the way."""
    params, specs = {name: normal(MLP) for name in RUN}, dict.fromkeys(RUN, MLP_SPECS)
    together = optax.GradientTransformation(
        lambda params: {name: ALL[name].init(params[name]) for name in RUN}, update_each
    )
    loss = lambda params, number: sum(mlp(params[name], number) for name in RUN)  # noqa: E731
    seen = []

    def look(states):
        seen.append({name: [held(leaf) for leaf in jax.tree.leaves(states[name])] for name in RUN})

    held = lambda leaf: (leaf.sharding, leaf.ndim, [shard.data.nbytes for shard in leaf.addressable_shards])  # noqa: E731
    after = run(loss, together, params, specs, sl.make_mesh(FSDP_TENSOR), steps=3, check=look)
    return after, alone(loss, together, params, steps=3), seen


def update_each(grads, states, params=None):
    done = {name: ALL[name].update(grads[name], states[name], params[name]) for name in RUN}
    return {name: updates for name, (updates, _) in done.items()}, {name: state for name, (_, state) in done.items()}


@pytest.mark.parametrize("name", RUN)
def test_opt_14_state_keeps_its_specs_its_bytes_and_the_numbers(name, trained):
    after, single, seen = trained
    mesh, params = sl.make_mesh(FSDP_TENSOR), normal(MLP)
    wanted = jax.tree.leaves(sl.shardings(resolve_state(ALL[name], params, MLP_SPECS, mesh=mesh).specs, mesh))
    assert len(seen) == 4
    for states in seen:
        for (sharding, rank, _), want in zip(states[name], wanted, strict=True):
            assert sharding.is_equivalent_to(want, rank)
        assert {sum(held[i] for _, _, held in states[name]) for i in range(8)} == {STATE_BYTES[name]}
    # Orthogonalising a momentum amplifies the rounding of its small singular values.
    agree(after[name], single[name], tolerance=1e-4 if name == "muon" else 1e-5)
    assert max(float(np.abs(after[name][key] - params[key]).max()) for key in params) > 1e-3


def test_opt_14_the_checks_see_replicated_state_and_a_doubled_gradient():
    mesh, optimizer, params = sl.make_mesh(FSDP_TENSOR), ALL["momentum"], normal(MLP)
    replicated = jax.jit(optimizer.init, out_shardings=NamedSharding(mesh, P()))(params)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(replicated))
    assert held == (2 * 16 * 32 + 32) * 4 != STATE_BYTES["momentum"]
    doubled = run(lambda *args: 2 * mlp(*args), optimizer, params, MLP_SPECS, mesh, steps=3)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        agree(doubled, alone(mlp, optimizer, params, steps=3))
