"""Models follow their parameters' dtype: with bfloat16 parameters every matrix product takes bfloat16 operands."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from meshes.build import abstract_mesh
from shardlib import annotate
from shardlib.place import active
from shardlib.strategies import default_rules
from tests.oracle import MODELS

BFLOAT16 = jnp.dtype(jnp.bfloat16)


def equations(jaxpr):
    """All equations of a program, those of its nested programs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner))


def abstract(name, dtype, **options):
    """Abstract arguments of an example, its floating parameters in `dtype`, and its loss."""
    module, loss, spec = MODELS[name](**options)
    batch = {key: leaf.abstract() for key, leaf in spec.items()}
    if name == "gpt":
        params = jax.eval_shape(module.init, jax.random.key(0), batch["inputs"])["params"]
        is_box = lambda leaf: isinstance(leaf, annotate.LogicalAxes)  # noqa: E731
        params = jax.tree.map(lambda leaf: leaf.value, params, is_leaf=is_box)
    else:
        params = nnx.eval_shape(lambda: nnx.state(module(nnx.Rngs(0)), nnx.Param))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    return loss, params, batch


def num_kernels(name):
    """Products with a kernel per scan body, and the head's: query, key, value, out, the MLP's two or three."""
    return {"gpt": 7, "gpt_nnx": 7, "llama": 8}[name]


def kernel_products(program):
    """Products with a kernel; those inside attention, which have batch dims, are `jax.nn`'s business.

    The gradient of its scores is float32, and so is one operand of the two products that use it.
    """
    products = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "dot_general"]
    return [eqn for eqn in products if eqn.params["dimension_numbers"][1] == ((), ())]


def train_program(name, dtype, *, sum_dtype=None, **options):
    loss, params, batch = abstract(name, dtype, **options)
    grad = jax.value_and_grad(lambda params, batch, rng: loss(params, batch, rng).value())
    in_force = active(default_rules(), abstract_mesh("data=1"), sum_dtype=sum_dtype) if sum_dtype else None
    return jax.make_jaxpr(annotate.under(in_force, grad))(params, batch, jax.random.key(0))


@pytest.mark.newest
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_products_take_the_parameters_dtype(name, tied):
    for dtype in (BFLOAT16, jnp.dtype(jnp.float32)):
        products = kernel_products(train_program(name, dtype, tied=tied))
        assert len(products) == 3 * num_kernels(name)
        assert {var.aval.dtype for eqn in products for var in eqn.invars} == {dtype}
        assert {eqn.outvars[0].aval.dtype for eqn in products} == {dtype}
    loss, params, batch = abstract(name, BFLOAT16, tied=tied)
    forward = jax.make_jaxpr(lambda params, batch: loss(params, batch, None))(params, batch)
    products = [eqn for eqn in equations(forward.jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(products) == num_kernels(name) + 2
    assert {var.aval.dtype for eqn in products for var in eqn.invars} == {BFLOAT16}
    assert [eqn.primitive.name for eqn in equations(forward.jaxpr)].count("scan") == 1
    assert {aval.dtype for aval in forward.out_avals} == {jnp.dtype(jnp.float32)}
    exponentials = [eqn for eqn in equations(forward.jaxpr) if eqn.primitive.name in ("exp", "log", "rsqrt")]
    assert {eqn.outvars[0].aval.dtype for eqn in exponentials} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", MODELS)
def test_sums_over_tensor_are_in_the_dtype_that_the_plan_says(name):
    """Every product with a kernel or a table, forward and backward; attention's own are within a head."""
    for tied in (False, True):
        products = kernel_products(train_program(name, BFLOAT16, sum_dtype="float32", tied=tied))
        assert len(products) == 3 * num_kernels(name)
        assert {var.aval.dtype for eqn in products for var in eqn.invars} == {BFLOAT16}
        assert {eqn.outvars[0].aval.dtype for eqn in products} == {jnp.dtype(jnp.float32)}
