"""Recurrent layers against loops over time: whole, in parts, packed, divided over a context axis; linen and NNX."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshes import make_mesh
from shardlib import annotate
from shardlib.layers import recurrent, recurrent_nnx
from shardlib.layers import recurrent_cells as cells
from shardlib.ops.linear_recurrence import context_recurrence, context_windows
from tests.oracle import assert_trees_equal
from tests.sequences import run

BATCH, LENGTH, EMBED, FEATURES, WIDTH, STREAMS = 2, 16, 6, 8, 3, 4
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(BATCH, LENGTH, EMBED)).astype(np.float32)
# Documents of 5, 1 and 10 steps, and of 7 and 9.
POSITIONS = np.array([[*range(5), 0, *range(10)], [*range(7), *range(9)]], np.int32)


def drawn(*shape):
    return DRAW.normal(size=shape).astype(np.float32) * 0.5


PARAMETERS = {
    "sru": (drawn(EMBED, 4, FEATURES), drawn(2, FEATURES)),
    "sru of equal sizes": (drawn(EMBED, 3, EMBED), drawn(2, EMBED)),
    "qrnn": (drawn(WIDTH, EMBED, 3, FEATURES), drawn(3, FEATURES)),
}
LAYERS = {"sru": cells.sru, "sru of equal sizes": cells.sru, "qrnn": cells.qrnn}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sru_in_turn(x, kernel, bias):
    """One document [length, embed], step by step."""
    cell, found = np.zeros(kernel.shape[2]), []
    for now in x:
        gates = np.einsum("e,egh->gh", now, kernel)
        forget, reset = sigmoid(gates[1] + bias[0]), sigmoid(gates[2] + bias[1])
        cell = forget * cell + (1 - forget) * gates[0]
        found.append(reset * np.tanh(cell) + (1 - reset) * (gates[3] if len(gates) == 4 else now))
    return np.stack(found)


def qrnn_in_turn(x, kernel, bias):
    """One document [length, embed], step by step."""
    padded = np.concatenate([np.zeros((WIDTH - 1, x.shape[1])), x])
    cell, found = np.zeros(kernel.shape[3]), []
    for step in range(len(x)):
        gates = np.einsum("we,wegh->gh", padded[step : step + WIDTH], kernel) + bias
        forget = sigmoid(gates[1])
        cell = forget * cell + (1 - forget) * np.tanh(gates[0])
        found.append(sigmoid(gates[2]) * cell)
    return np.stack(found)


def in_turn(kind, *, packed):
    """All documents of all rows, each alone."""
    function = qrnn_in_turn if kind == "qrnn" else sru_in_turn
    rows = []
    for row, positions in zip(X.astype(np.float64), POSITIONS, strict=True):
        starts = np.flatnonzero(positions == 0) if packed else [0]
        documents = np.split(row, starts[1:])
        rows.append(np.concatenate([function(document, *PARAMETERS[kind]) for document in documents]))
    return np.stack(rows).astype(np.float32)


@pytest.mark.newest
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_equals_its_loop(kind, packed):
    layer = functools.partial(LAYERS[kind], positions=POSITIONS if packed else None)
    found, _ = run(layer, X, *PARAMETERS[kind])
    assert_trees_equal(np.asarray(found), in_turn(kind, packed=packed), kind)


def test_documents_do_reach_into_each_other_without_positions():
    """Negative control."""
    assert np.abs(in_turn("qrnn", packed=True) - in_turn("qrnn", packed=False)).max() > 0.01


def with_gradients(kind, **options):
    """Outputs and gradients of x and the parameters of a packed layer."""
    weights = np.random.default_rng(1).normal(size=in_turn(kind, packed=True).shape).astype(np.float32)

    def objective(*operands):
        found, _ = LAYERS[kind](*operands, positions=POSITIONS, **options)
        return (weights * found**2).sum(), found

    (_, found), grads = run(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True), X, *PARAMETERS[kind])
    return jax.tree.map(np.asarray, {"found": found, "grads": grads})


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("sru", "data=2,context=4"),
        ("qrnn", "data=2,context=4"),
        pytest.param("sru of equal sizes", "data=2,context=2", marks=pytest.mark.exhaustive),
        pytest.param("qrnn", "data=2,context=2", marks=pytest.mark.exhaustive),
        pytest.param("sru", "context=8", marks=pytest.mark.exhaustive),
        pytest.param("qrnn", "context=8", marks=pytest.mark.exhaustive),
    ],
)
def test_a_layer_over_a_divided_sequence_equals_one_device(kind, mesh):
    mesh = make_mesh(mesh)
    options = {"recurrence": functools.partial(context_recurrence, mesh=mesh)}
    if kind == "qrnn":
        options["windows"] = functools.partial(context_windows, mesh=mesh)
    assert_trees_equal(with_gradients(kind, **options), with_gradients(kind), kind)


def test_the_mesh_in_force_is_found():
    with jax.set_mesh(make_mesh("context=4,data=2")):
        lowered = jax.jit(cells.qrnn).lower(X, *PARAMETERS["qrnn"]).as_text()
    assert "collective_permute" in lowered
    assert "collective_permute" not in jax.jit(cells.qrnn).lower(X, *PARAMETERS["qrnn"]).as_text()


def streams_of(positions=None, state=None):
    """The arguments of an LSTM over streams, every stream with its own inputs."""
    draw = np.random.default_rng(5)
    shapes = [(STREAMS, BATCH, LENGTH, EMBED), (STREAMS, EMBED, 4, 5), (STREAMS, 5, 4, 5), (STREAMS, 4, 5)]
    return [0.5 * draw.normal(size=shape).astype(np.float32) for shape in shapes]


def lstm_in_turn(x, kernel, recurrent_kernel, bias):
    """One document [length, embed] of one stream, step by step."""
    hidden = cell = np.zeros(kernel.shape[2])
    found = []
    for now in x:
        gates = np.einsum("e,egh->gh", now, kernel) + np.einsum("e,egh->gh", hidden, recurrent_kernel) + bias
        cell = sigmoid(gates[1]) * cell + sigmoid(gates[0]) * np.tanh(gates[2])
        hidden = sigmoid(gates[3]) * np.tanh(cell)
        found.append(hidden)
    return np.stack(found)


@pytest.mark.parametrize("packed", [False, True])
def test_streams_equal_their_loops(packed):
    x, *parameters = streams_of()
    found, _ = run(functools.partial(cells.stream_lstm, positions=POSITIONS if packed else None), x, *parameters)
    for stream in range(STREAMS):
        for row in range(BATCH):
            starts = np.flatnonzero(POSITIONS[row] == 0) if packed else [0]
            documents = np.split(x[stream, row].astype(np.float64), starts[1:])
            each = [lstm_in_turn(document, *(leaf[stream] for leaf in parameters)) for document in documents]
            wanted = np.concatenate(each).astype(np.float32)
            assert_trees_equal(np.asarray(found[stream, row]), wanted, f"stream {stream}")


def test_streams_go_on_from_their_state():
    x, *parameters = streams_of()
    whole, last = run(cells.stream_lstm, x, *parameters)
    first, state = run(cells.stream_lstm, x[:, :, :7], *parameters)
    rest, end = run(lambda x, state: cells.stream_lstm(x, *parameters, state=state), x[:, :, 7:], state)
    assert_trees_equal(np.concatenate([first, rest], axis=2), np.asarray(whole), "hidden")
    assert_trees_equal(jax.tree.map(np.asarray, end), jax.tree.map(np.asarray, last), "state")


MODULES = {
    "SRU": (recurrent.SRU(FEATURES), functools.partial(recurrent_nnx.SRU, EMBED, FEATURES), X.shape),
    "QRNN": (recurrent.QRNN(FEATURES), functools.partial(recurrent_nnx.QRNN, EMBED, FEATURES), X.shape),
    "StreamLSTM": (
        recurrent.StreamLSTM(FEATURES),
        functools.partial(recurrent_nnx.StreamLSTM, STREAMS, EMBED, FEATURES),
        (STREAMS, *X.shape),
    ),
    "StreamHead": (
        recurrent.StreamHead(5),
        functools.partial(recurrent_nnx.StreamHead, STREAMS, EMBED, classes=5),
        (STREAMS, *X.shape),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_linen_and_nnx_are_the_same_layer(name):
    linen, made, shape = MODULES[name]
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    boxed = jax.eval_shape(linen.init, jax.random.key(0), x)["params"]
    module = made(rngs=nnx.Rngs(0))
    flat = {path[-1]: variable for path, variable in nnx.to_flat_state(nnx.state(module))}
    assert {key: box.names for key, box in boxed.items()} == {
        key: variable.get_metadata()[annotate.METADATA_KEY] for key, variable in flat.items()
    }
    params = {key: variable[...] for key, variable in flat.items()}
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, nn.meta.unbox(boxed))
    found = run(module, x)
    wanted = run(lambda x: linen.apply({"params": params}, x), x)
    assert_trees_equal(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, wanted), name)


def test_kernels_are_drawn_for_one_gate():
    """The variance is 1 / fan in of one gate, whatever is stacked beside it."""
    kernels = {
        32: (cells.SRU_KERNEL, (32, 4, 512)),
        64: (cells.QRNN_KERNEL, (2, 32, 3, 512)),
        16: (cells.STREAM_KERNEL, (8, 16, 4, 128)),
        80: (cells.STREAM_HEAD, (8, 10, 300)),
    }
    for fan_in, (draw, shape) in kernels.items():
        kernel = jax.jit(draw, static_argnums=1)(jax.random.key(0), shape)
        assert float(np.var(kernel)) * fan_in == pytest.approx(1, rel=0.05)


def test_bfloat16_products_and_float32_cells():
    x = X.astype(jnp.bfloat16)
    parameters = [leaf.astype(jnp.bfloat16) for leaf in PARAMETERS["sru"]]
    hidden, cell = jax.eval_shape(cells.sru, x, *parameters)
    assert (hidden.dtype, cell.dtype) == (jnp.bfloat16, jnp.float32)
    products = [e for e in jax.make_jaxpr(cells.sru)(x, *parameters).eqns if e.primitive.name == "dot_general"]
    assert [product.outvars[0].aval.dtype for product in products] == [jnp.bfloat16]
