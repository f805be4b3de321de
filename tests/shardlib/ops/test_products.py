"""Products summed in a wide dtype: the values and gradients of `jax.lax.dot_general`, narrow operands throughout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import annotate
from shardlib.ops.products import products_summed_in

CASES = {
    "matrix": ((2, 3, 4), (4, 5), (((2,), (0,)), ((), ()))),
    "two contracted": ((2, 3, 4, 5), (4, 5, 6), (((2, 3), (0, 1)), ((), ()))),
    "contracted in another order": ((2, 3, 4), (2, 5, 4, 3), (((1, 2), (3, 2)), ((0,), (0,)))),
    "batch dims anywhere": ((3, 4, 2), (5, 4, 2, 7), (((1,), (1,)), ((2,), (2,)))),
}
WIDE = products_summed_in("float32")


def operands(name, dtype=jnp.bfloat16):
    draw = np.random.default_rng(0)
    lhs, rhs, dims = CASES[name]
    return jnp.asarray(draw.normal(size=lhs), dtype), jnp.asarray(draw.normal(size=rhs), dtype), dims


def value_and_grad(op, dims):
    return jax.value_and_grad(lambda lhs, rhs: (op(lhs, rhs, dims).astype(jnp.float32) ** 2).sum(), argnums=(0, 1))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_the_plain_product(name):
    lhs, rhs, dims = operands(name)
    found, wanted = (value_and_grad(op, dims)(lhs, rhs) for op in (WIDE, jax.lax.dot_general))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-7)


def test_the_three_products_are_narrow_with_wide_sums():
    lhs, rhs, dims = operands("matrix")
    program = jax.make_jaxpr(jax.grad(lambda *operands: WIDE(*operands, dims).astype(jnp.float32).sum(), (0, 1)))(
        lhs, rhs
    )
    products = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert len(products) == 2  # those of the backward pass; the forward product is inside the custom rule, or unused
    for eqn in products:
        assert {var.aval.dtype for var in eqn.invars} == {jnp.dtype(jnp.bfloat16)}
        assert eqn.outvars[0].aval.dtype == jnp.float32


def test_products_that_are_wide_already_are_left_alone():
    lhs, rhs, dims = operands("matrix", jnp.float32)
    plain = jax.make_jaxpr(lambda a, b: jax.lax.dot_general(a, b, dims))(lhs, rhs)
    assert str(jax.make_jaxpr(lambda a, b: WIDE(a, b, dims))(lhs, rhs)) == str(plain)
    assert str(jax.make_jaxpr(lambda a, b: annotate.dot_general(a, b, dims))(lhs, rhs)) == str(plain)
    lhs, rhs, dims = operands("matrix")
    assert WIDE(lhs, rhs, dims, preferred_element_type=jnp.float32).dtype == jnp.float32
    whole = jnp.ones((2, 3, 4), jnp.int32), jnp.ones((4, 5), jnp.int32)
    assert WIDE(*whole, dims).dtype == jnp.int32
