"""Field troubles, group PRC: PRC-2, the dtype of sums over a tensor axis beside that of sums over data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from meshes import ShardingError
from shardlib import annotate
from shardlib.audit.hlo import parse
from shardlib.audit.program import axes_of
from tests.oracle import MODELS, token_batch
from tests.partitioned import partitioned
from tests.tiny import gradient, rows, weight

TINY = 2.0**-10
MESH = "data=2,tensor=2"
ROW_BY_COLUMN = (((1,), (0,)), ((), ()))


def product_loss(params, batch, rng):
    """Products contracted over a dim that tensor splits, in the operands' dtype, and their sum in float32."""
    w = params["w"].get_value()
    y = annotate.dot_general(batch["x"].astype(w.dtype), w, ROW_BY_COLUMN)
    return sl.Loss(total=y.astype(jnp.float32).sum(), weight=float(y.size))


def sums_by_axis(plan):
    """The dtypes of all-reduces of a step's gradients by mesh axis, before the backend widens them."""
    spec = {"x": rows(4, 4)}
    bound = sl.bind(weight(np.ones((4, 8)), "mlp", "embed"), product_loss, plan, spec)
    program = parse(partitioned(sl.Trainer(bound, optax.sgd(0.1)).lowered))
    found = {}
    for collective in program.collectives:
        if collective.kind == "all-reduce" and any(shape.dims for shape in collective.operands):
            (axis,) = axes_of(collective, plan.mesh).axes
            found.setdefault(axis, set()).update(shape.dtype for shape in collective.operands)
    return found


@pytest.mark.newest
@pytest.mark.parametrize("lowering", ["automatic", "explicit"])
def test_prc_02_the_program_adds_over_tensor_in_the_dtype_asked_for(lowering):
    precision = {"compute_dtype": "bfloat16", "lowering": lowering}
    precision["reduce_dtype"] = "bfloat16" if lowering == "automatic" else "float32"
    for asked, wanted in ((None, "bf16"), ("float32", "f32"), ("bfloat16", "bf16")):
        found = sums_by_axis(sl.Plan(mesh=MESH, tensor_reduce_dtype=asked, **precision))
        assert found["tensor"] == {wanted}
        if lowering == "explicit":
            assert found["data"] == {"f32"}  # a choice of its own


@pytest.mark.newest
def test_prc_02_a_sum_of_two_shards_keeps_the_small_one():
    """1 on one shard of tensor and 2^-10 on the other; the same over data, in a gradient."""

    def loss(params, batch, rng):
        w = params["w"].get_value()
        x = batch["x"].astype(w.dtype)
        y = annotate.dot_general(x, w, ROW_BY_COLUMN, preferred_element_type=jnp.float32)
        return sl.Loss(total=y.sum(), weight=None, aux={"y": sl.Mean(y.sum(), float(y.shape[0]))})

    value = np.float32([[1], [TINY]])
    precision = {"mesh": MESH, "compute_dtype": "bfloat16", "tensor_reduce_dtype": "float32"}
    # Row i of the batch is on shard i of data.
    batch = {"x": np.float32([[1, 1], [TINY, TINY]])}
    found, metrics = gradient(loss, batch, value=value, names=("mlp", None), **precision)
    assert float(metrics["y"]) == (1 + TINY) ** 2 / 2
    assert found.ravel().tolist() == [1 + TINY, 1 + TINY] == [1.0009765625] * 2
    batch = {"x": np.ones((2, 2), np.float32)}
    _, metrics = gradient(loss, batch, value=value, names=("mlp", None), **precision)
    assert float(metrics["y"]) == 1.0009765625
    # Negative control: gradients of 1 and 2^-10 added over data as bfloat16.
    batch = {"x": np.float32([[1, 1], [TINY, TINY]])}
    found, _ = gradient(loss, batch, value=value, names=("mlp", None), reduce_dtype="bfloat16", **precision)
    assert found.ravel().tolist() == [1.0, 1.0]


def test_prc_02_a_narrow_result_is_rounded_once():
    """Partial sums 1 + 2^-8 and -1: rounded before they are added they give 0."""
    value = np.float32([[1], [2**-8], [-1], [0]])
    batch = {"x": np.ones((2, 4), np.float32)}
    precision = {"mesh": MESH, "compute_dtype": "bfloat16", "tensor_reduce_dtype": "float32"}
    _, metrics = gradient(product_loss, batch, value=value, names=("mlp", None), **precision)
    assert float(metrics["loss"]) == 2**-8


def test_prc_02_the_choice_is_part_of_the_plan():
    plan = sl.Plan(mesh=MESH, compute_dtype="bfloat16", tensor_reduce_dtype="float32")
    assert sl.Plan.from_json(plan.to_json()) == plan
    assert "partial products are added over tensor as float32" in plan.choices
    assert "partial products are added over tensor as bfloat16, the dtype of the products" in (
        sl.Plan(mesh=MESH, compute_dtype="bfloat16").choices
    )
    assert not [line for line in sl.Plan(mesh="data=2").choices if "partial products" in line]
    with pytest.raises(ShardingError, match="tensor_reduce_dtype=bfloat16 with compute_dtype=float32"):
        sl.Plan(mesh=MESH, tensor_reduce_dtype="bfloat16")
    with pytest.raises(ShardingError, match=r"tensor_reduce_dtype='float16' is unknown"):
        sl.Plan(mesh=MESH, tensor_reduce_dtype="float16")


@pytest.mark.exhaustive
def test_prc_02_a_whole_model_trains_with_wide_sums():
    module, loss, spec = MODELS["llama"](tied=True)
    found = []
    for asked in (None, "float32"):
        plan = sl.Plan(mesh=MESH, compute_dtype="bfloat16", tensor_reduce_dtype=asked, remat="dots", num_microbatches=2)
        trainer = sl.Trainer(sl.bind(module, loss, plan, spec), optax.sgd(0.1))
        state, losses = trainer.init(jax.random.key(0)), []
        for step in range(2):
            state, metrics = trainer.step(state, token_batch(step))
            losses.append(float(metrics["loss"]))
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)
