"""Recurrences over a divided sequence: states and gradients of one device, and what crosses between shards."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes import make_mesh
from meshes.errors import ShardingError
from shardlib.audit.hlo import parse
from shardlib.ops.linear_recurrence import context_recurrence, context_windows, linear_recurrence, windows
from tests.oracle import assert_trees_equal
from tests.sequences import QUICK, run

BATCH, LENGTH, FEATURES, WIDTH = 4, 16, 3, 3
DRAW = np.random.default_rng(0)
X, OUT = (DRAW.normal(size=(BATCH, LENGTH, FEATURES)).astype(np.float32) for _ in range(2))
# Documents begin at steps where nothing is kept.
DECAY = (DRAW.random((BATCH, LENGTH, FEATURES)) * (DRAW.random((BATCH, LENGTH, 1)) > 0.2)).astype(np.float32)
INITIAL = DRAW.normal(size=(BATCH, FEATURES)).astype(np.float32)
BEFORE = DRAW.normal(size=(BATCH, WIDTH - 1, FEATURES)).astype(np.float32)


def step_by_step(decay, inputs, initial):
    """The recurrence as a loop."""

    def step(state, now):
        state = now[0] * state + now[1]
        return state, state

    _, states = jax.lax.scan(step, initial, (decay.swapaxes(0, 1), inputs.swapaxes(0, 1)))
    return states.swapaxes(0, 1)


def by_hand(x, before):
    """Windows as an index into the padded sequence."""
    padded = jnp.concatenate([before, x], axis=1)
    return jnp.stack([padded[:, t : t + WIDTH] for t in range(LENGTH)], axis=1)


def recurrence(decay, inputs, initial, **options):
    return context_recurrence(decay, inputs, initial=initial, **options)


def windowed(x, before, **options):
    return context_windows(x, before=before, width=WIDTH, **options)


KINDS = {"recurrence": (recurrence, step_by_step, (DECAY, X, INITIAL)), "windows": (windowed, by_hand, (X, BEFORE))}


def with_gradients(function, operands):
    """The result and the gradient of every operand, of a weighted sum of squares."""

    def objective(*operands):
        result = function(*operands)
        weights = jnp.asarray(OUT).reshape(*OUT.shape[:2], *[1] * (result.ndim - 3), FEATURES)
        return (weights * result**2).sum(), result

    gradients = jax.value_and_grad(objective, argnums=tuple(range(len(operands))), has_aux=True)
    (_, result), grads = run(gradients, *operands)
    return {"result": np.asarray(result), "grads": jax.tree.map(np.asarray, grads)}


@functools.cache
def alone(kind):
    _, wanted, operands = KINDS[kind]
    return with_gradients(wanted, operands)


EVERY = set(itertools.product(KINDS, (2, 4, 8), ("gather", "permute")))
DEFAULT = {("recurrence", 2, "permute"), ("recurrence", 4, "gather"), ("recurrence", 8, "permute")}
DEFAULT |= {("recurrence", 8, "gather"), ("windows", 4, "permute"), ("windows", 8, "gather")}


@pytest.mark.newest
@pytest.mark.parametrize(("kind", "context", "exchange"), sorted(DEFAULT))
def test_a_divided_sequence_equals_one_device(kind, context, exchange):
    check_divided(kind, context, exchange)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "context", "exchange"), sorted(EVERY - DEFAULT))
def test_every_divided_sequence_equals_one_device(kind, context, exchange):
    check_divided(kind, context, exchange)


def check_divided(kind, context, exchange):
    found, _, operands = KINDS[kind]
    mesh = make_mesh(f"data={min(2, 8 // context)},context={context}")
    got = with_gradients(functools.partial(found, mesh=mesh, exchange=exchange), operands)
    assert_trees_equal(got, alone(kind), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_mesh(kind):
    found, _, operands = KINDS[kind]
    assert_trees_equal(with_gradients(found, operands), alone(kind), kind)


def test_nothing_before_is_zero():
    zeros = [np.zeros_like(INITIAL), np.zeros_like(BEFORE)]
    bare = run(functools.partial(linear_recurrence, axis=None), DECAY, X)
    np.testing.assert_array_equal(bare, run(recurrence, DECAY, X, zeros[0]))
    bare = run(functools.partial(windows, width=WIDTH, axis=None), X)
    np.testing.assert_array_equal(bare, run(windowed, X, zeros[1]))


@pytest.mark.parametrize(("manual", "check_vma"), [("all", True), ("all", False), ("data", False)])
@pytest.mark.parametrize("kind", KINDS)
def test_inside_another_manual_region(kind, manual, check_vma):
    """Differentiated inside, as pipelines and the explicit lowering do: manual over both axes, or over data alone."""
    found, _, operands = KINDS[kind]
    mesh = make_mesh("data=2,context=4")
    length = "context" if manual == "all" else None
    axes = {"data", "context"} if manual == "all" else {"data"}
    *sequences, whole = (P("data", length),) * (len(operands) - 1), P("data")
    specs = (*sequences[0], whole)

    def objective(*operands):
        out, *operands = operands
        result = found(*operands)
        weights = out.reshape(*out.shape[:2], *[1] * (result.ndim - 3), FEATURES)
        return (weights * result**2).sum(), result

    def local(*operands):
        (_, result), grads = jax.value_and_grad(objective, argnums=tuple(range(1, len(operands))), has_aux=True)(
            *operands
        )
        last = grads[-1]
        if length and not check_vma:
            last = jax.lax.psum(last, "context")  # a checked region adds up what did not vary
        return result, (*grads[:-1], last)

    region = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data", length), *specs),
        out_specs=(P("data", length), specs),
        axis_names=axes,
        check_vma=check_vma,
    )
    result, grads = run(region, OUT, *operands)
    assert_trees_equal({"result": result, "grads": grads}, alone(kind), kind)


def test_under_a_condition_that_differs_between_devices():
    """As in the ticks of a pipeline: only the first of two stages computes, the other does not come to the exchange."""
    mesh = make_mesh("stage=2,context=4")

    def objective(decay, x, initial):
        states = context_recurrence(decay, x, initial=initial)
        return (context_windows(states, width=WIDTH) ** 2).sum()

    def local(*operands):
        is_first = jax.lax.axis_index("stage") == 0
        gradients = jax.grad(objective, argnums=(0, 1, 2))
        idle = lambda *operands: jax.tree.map(jnp.zeros_like, operands)  # noqa: E731
        found = jax.lax.cond(is_first, gradients, idle, *operands)
        return jax.tree.map(lambda x: jax.lax.psum(x, "stage"), found)

    region = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=False)
    found, wanted = run(region, DECAY, X, INITIAL), run(jax.grad(objective, argnums=(0, 1, 2)), DECAY, X, INITIAL)
    assert_trees_equal(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, wanted), "gradient")


def collectives(function, operands, *, context, gradients=False):
    """(kind, executions, operand bytes) of the compiled program of sequences that lie where they are wanted."""
    mesh = make_mesh(f"data={8 // context},context={context}")
    placed = NamedSharding(mesh, P("data", "context"))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in operands]
    forward = functools.partial(function, mesh=mesh)
    both = lambda *operands: jax.vjp(forward, *operands)[1](operands[-1] * 0 + 1)  # noqa: E731
    lowered = jax.jit(both if gradients else forward).lower(*shapes)
    totals = parse(str(lowered.compile(compiler_options=QUICK).as_text())).totals
    return {kind: (total.times_executed, total.operand_bytes) for kind, total in totals.items()}


GATHER, PERMUTE = (functools.partial(context_recurrence, exchange=exchange) for exchange in ("gather", "permute"))


@pytest.mark.parametrize("length", [16, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_only_carries_cross(length):
    """The bytes of the docstring, which know no length; the same for a sequence four times as long."""
    operands = [np.zeros((BATCH, length, FEATURES), np.float32)] * 2
    for context, rounds in ((2, 1), (4, 3), (8, 4)):
        carry = 8 * BATCH * context // 8 * FEATURES
        assert rounds == 1 + math.ceil(math.log2(context - 1))
        found = collectives(PERMUTE, operands, context=context)
        assert found == {"collective-permute": (rounds, rounds * carry)}, context
        found = collectives(GATHER, operands, context=context)
        assert found == ({"all-gather": (1, carry)} if context == 8 else {"all-reduce": (1, context * carry)})
    both = collectives(GATHER, operands, context=8, gradients=True)
    assert both == {"all-gather": (2, 2 * 8 * BATCH * FEATURES)}


@pytest.mark.parametrize("length", [16, 64])
def test_gradients_send_as_much_again(length):
    operands = [np.zeros((BATCH, length, FEATURES), np.float32)] * 2
    both = collectives(PERMUTE, operands, context=4, gradients=True)
    assert both == {"collective-permute": (6, 6 * 8 * BATCH // 2 * FEATURES)}


@pytest.mark.parametrize("length", [16, 64])
def test_a_window_takes_one_permute_of_its_halo(length):
    operands = [np.zeros((BATCH, length, FEATURES), np.float32)]
    halo = BATCH // 2 * (WIDTH - 1) * FEATURES * 4
    function = functools.partial(context_windows, width=WIDTH)
    assert collectives(function, operands, context=4) == {"collective-permute": (1, halo)}


def test_a_step_by_step_loop_over_a_divided_sequence_moves_it():
    """Negative control: the compiler brings the whole sequence together, and its bytes grow with the length."""

    def sent(length):
        operands = [np.zeros((BATCH, length, FEATURES), np.float32)] * 2
        loop = lambda decay, x, mesh: step_by_step(decay, x, jnp.zeros_like(decay[:, 0]))  # noqa: E731
        return sum(total for _, total in collectives(loop, operands, context=4).values())

    assert sent(64) > 2 * sent(16) > 0


def test_no_level_of_the_scan_is_kept():
    """Backward keeps the decay, the states and a carry."""
    _, backward = jax.eval_shape(lambda *x: jax.vjp(functools.partial(linear_recurrence, axis=None), *x), DECAY, X)
    kept = sorted(leaf.shape for leaf in jax.tree.leaves(backward))
    assert kept == [(BATCH, FEATURES), X.shape, X.shape]


def test_the_state_before_a_document_does_not_reach_into_it():
    decay = np.full_like(DECAY, 0.9)
    decay[:, 5] = 0
    changed = X.copy()
    changed[:, :5] += 1
    a, b = (np.asarray(run(functools.partial(linear_recurrence, axis=None), decay, x)) for x in (X, changed))
    np.testing.assert_array_equal(a[:, 5:], b[:, 5:])
    assert (a[:, :5] != b[:, :5]).all()


def test_errors():
    mesh = make_mesh("context=8")
    with pytest.raises(ShardingError, match=r"length 15 is not divisible by context=8\n  fix: pad .* to length 16"):
        context_recurrence(DECAY[:, :15], X[:, :15], mesh=mesh)
    with pytest.raises(ShardingError, match=r"a window of 4 steps reaches over more than the 2 steps .*\n  fix: .* 5"):
        context_windows(X, width=4, mesh=mesh)
    explicit = jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ShardingError, match="axis 'context' is Explicit"):
        context_windows(X, width=2, mesh=explicit)
