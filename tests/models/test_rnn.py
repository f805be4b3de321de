"""The recurrent language model: named parameters, the loss of packed documents, training on meshes as on one device."""

import dataclasses
import functools

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardlib as sl
from meshes import make_mesh
from models import rnn
from shardlib import annotate
from shardlib.data.packing import pack
from tests.oracle import OPTIMIZERS, assert_equal_to_one_device, assert_losses_equal, host, run

TINY = {"layers": 2, "embed": 16, "mlp": 32, "vocab": 64, "batch": 8, "length": 16}


def names(**options):
    """Path -> (logical axes, shape), from abstract values."""
    module, _, spec = rnn.small(**options)
    boxed = jax.eval_shape(module.init, jax.random.key(0), spec["inputs"].abstract())["params"]
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda leaf: isinstance(leaf, annotate.LogicalAxes))
    return {"/".join(key.key for key in path): (box.names, box.value.shape) for path, box in leaves}


def test_every_parameter_is_named():
    found = names(**TINY)
    assert {path: axes for path, (axes, _) in found.items()} == {
        "embed/embedding": ("vocab", "embed"),
        "head/kernel": ("embed", "vocab"),
        "norm/scale": ("embed",),
        "norm/bias": ("embed",),
        "layers/norm/scale": ("layers", "embed"),
        "layers/norm/bias": ("layers", "embed"),
        "layers/cell/kernel": ("layers", "embed", None, "mlp"),
        "layers/cell/bias": ("layers", None, "mlp"),
        "layers/down/kernel": ("layers", "mlp", "embed"),
        "layers/down/bias": ("layers", "embed"),
    }
    assert found["layers/cell/kernel"][1] == (2, 16, 4, 32)
    assert names(**TINY, cell="qrnn", width=3)["layers/cell/kernel"] == (
        ("layers", None, "embed", None, "mlp"),
        (2, 3, 16, 3, 32),
    )
    assert set(found) - set(names(**TINY, tied=True)) == {"head/kernel"}


def test_the_small_model():
    assert sum(int(np.prod(shape)) for _, shape in names().values()) == 724_736
    assert set(rnn.small()[2]) == {"inputs", "targets"}
    packed = rnn.small(packed=True, batch=4, length=32)[2]
    assert {name: (leaf.shape, leaf.dtype, leaf.axes) for name, leaf in packed.items()} == {
        "inputs": ((4, 32), "int32", ("batch", "length")),
        "targets": ((4, 32), "int32", ("batch", "length")),
        "positions": ((4, 32), "int32", ("batch", "length")),
        "weights": ((4, 32), "float32", ("batch", "length")),
    }


def test_impossible_options():
    with pytest.raises(ValueError, match=r"cell='gru' is not one of \('sru', 'qrnn'\)"):
        rnn.small(cell="gru")
    with pytest.raises(ValueError, match="width=0 is not positive"):
        rnn.small(width=0)
    with pytest.raises(ValueError, match=r"dropout=1 is not in \[0, 1\)"):
        rnn.small(dropout=1)


def trainer_of(plan, **options):
    module, loss, spec = rnn.small(**TINY, **options)
    return sl.Trainer(sl.bind(module, loss, plan, spec), OPTIMIZERS["sgd"])


@functools.cache
def one_device(cell):
    """The state to start from, on the host, and what three steps on one device make of it."""
    trainer = trainer_of(sl.Plan(mesh="data=1"), cell=cell)
    state = trainer.init(jax.random.key(0))
    start = dataclasses.replace(host(dataclasses.replace(state, rng=0)), rng=None)
    return start, run(trainer, dataclasses.replace(start, rng=jax.random.key(7)))


def check(plan, cell):
    start, wanted = one_device(cell)
    assert wanted.losses[0] != wanted.losses[1]
    found = run(trainer_of(plan, cell=cell), dataclasses.replace(start, rng=jax.random.key(7)))
    assert_equal_to_one_device(found, wanted)


PIPELINE = {"schedule": "1f1b", "num_microbatches": 4}


@pytest.mark.newest
@pytest.mark.parametrize(
    ("mesh", "cell", "options"),
    [
        ("data=8", "sru", {}),
        ("stage=2,data=2", "sru", PIPELINE),
        pytest.param("data=8", "qrnn", {}, marks=pytest.mark.exhaustive),
        pytest.param("fsdp=2,tensor=4", "sru", {}, marks=pytest.mark.exhaustive),
        pytest.param("fsdp=2,tensor=4", "qrnn", {}, marks=pytest.mark.exhaustive),
        pytest.param("stage=2,tensor=2,data=2", "qrnn", PIPELINE, marks=pytest.mark.exhaustive),
        pytest.param("stage=2,tensor=2,data=2", "sru", PIPELINE, marks=pytest.mark.exhaustive),
    ],
)
def test_training_equals_one_device(mesh, cell, options):
    check(sl.Plan(mesh=mesh, **options), cell)


def test_the_loss_of_packed_documents_over_eight_devices_is_that_of_documents_alone():
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, TINY["vocab"], size) for size in (2, 3, 5, 7, 11, 13, 16, 4, 6, 9)]
    (packed,) = pack(documents, length=TINY["length"], batch=8, ranks=8)
    assert (packed["segment_ids"].max(axis=1) > 1).any()
    alone = {name: np.zeros((len(documents), TINY["length"]), packed[name].dtype) for name in packed}
    for row, document in enumerate(documents):
        alone["inputs"][row, : len(document)] = document
        alone["targets"][row, : len(document) - 1], alone["weights"][row, : len(document) - 1] = document[1:], 1
    del alone["positions"]
    module, loss, spec = rnn.small(**TINY, packed=True)
    boxed = jax.eval_shape(module.init, jax.random.key(0), spec["inputs"].abstract())["params"]
    params = jax.tree.map(lambda leaf: 0.3 * draw.standard_normal(leaf.shape, np.float32), nn.meta.unbox(boxed))
    divided = NamedSharding(make_mesh("data=8"), PartitionSpec("data"))
    found = jax.jit(loss, static_argnums=2)(params, jax.device_put(packed, divided), None)
    wanted = jax.jit(loss, static_argnums=2)(params, alone, None)
    assert float(found.weight) == sum(len(document) - 1 for document in documents)
    assert_losses_equal(found.value(), wanted.value())
    blind = jax.jit(loss, static_argnums=2)(params, packed | {"positions": np.ones_like(packed["positions"])}, None)
    assert abs(float(blind.value() / wanted.value()) - 1) > 1e-4  # negative control


def test_the_layers_are_one_scan():
    """So that a pipeline finds them; positions are made once, outside."""
    module, loss, spec = rnn.small(**TINY, packed=True)
    batch = {name: leaf.abstract() for name, leaf in spec.items()}
    params = jax.eval_shape(module.init, jax.random.key(0), batch["inputs"])["params"]
    params = nn.meta.unbox(params)
    jaxpr = jax.make_jaxpr(lambda params, batch: loss(params, batch, None).total)(params, batch)
    (scan,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert scan.params["length"] == TINY["layers"]
    assert [out.aval.shape for out in scan.outvars] == [(8, 16, 16)]


@pytest.mark.parametrize("cell", ["sru", "qrnn"])
def test_activations_are_named_at_their_rank(cell):
    seen = set()

    def record(x, names):
        assert len(names) == x.ndim, (names, x.shape)
        seen.add(names)
        return x

    module, loss, spec = rnn.small(**TINY, cell=cell)
    batch = {name: leaf.abstract() for name, leaf in spec.items()}
    params = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), batch["inputs"])["params"])
    named = annotate.under(annotate.Active(constrain=record), lambda params, batch: loss(params, batch, None))
    jax.eval_shape(named, params, batch)
    wanted = {
        ("batch", "length", "embed"),
        ("batch", "length", None, "mlp"),
        ("batch", "length", "mlp"),
        ("batch", "length", "vocab"),
    }
    if cell == "qrnn":  # windows are of whole sequences, as far as a tensor axis goes
        wanted |= {("batch", "length", None)}
    assert seen == wanted
