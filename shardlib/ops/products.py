"""Matrix products whose sums, and the sums of whose gradients, are made and moved in a chosen dtype.

In: operands in a narrow dtype. Out: the product in that dtype, added up in a wider one. Where a contracted dim is
split over devices, the compiler adds partial results in the dtype it was asked for, before the cast back.

    op = products_summed_in(jnp.float32)    # with the signature of jax.lax.dot_general
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def products_summed_in(dtype: Any) -> Callable[..., jax.Array]:
    """Builds the product op of a plan.

    Args:
        dtype: of the sums; products of a dtype as wide or wider are left to `jax.lax.dot_general`.

    Returns:
        A function with the signature of `jax.lax.dot_general` and its results, rounded once. The two products of its
        backward pass are summed the same way: a column-split layer has its sum over devices there.
    """

    def dot_general(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, **options):
        floating = lhs.dtype == rhs.dtype and jnp.issubdtype(lhs.dtype, jnp.floating)
        wanted = floating and jnp.finfo(lhs.dtype).bits < jnp.finfo(dtype).bits
        given = [preferred_element_type, *options.values()]
        if wanted and all(option is None for option in given):
            return _rounded_once(dimension_numbers, precision, jnp.dtype(dtype))(lhs, rhs)
        options |= {"precision": precision, "preferred_element_type": preferred_element_type}
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, **options)

    return dot_general


def _rounded_once(dims: Any, precision: Any, dtype: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The product and its gradients, each summed in `dtype` and rounded to the operands' dtype at the end.

    JAX's own transpose would multiply a widened cotangent with a narrow operand, a product in the wide dtype.
    """

    @jax.custom_vjp
    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        summed = jax.lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=dtype)
        return summed.astype(lhs.dtype)

    def forward(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return product(lhs, rhs), (lhs, rhs)

    def backward(operands: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        lhs, rhs = operands
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dims
        swapped = (rhs_contracted, lhs_contracted), (rhs_batch, lhs_batch)
        multiply = functools.partial(_transposed, precision=precision, dtype=dtype)
        return multiply(cotangent, lhs, rhs, dims, is_rhs=False), multiply(cotangent, rhs, lhs, swapped, is_rhs=True)

    product.defvjp(forward, backward)
    return product


def _transposed(
    cotangent: jax.Array, x: jax.Array, y: jax.Array, dims: Any, *, is_rhs: bool, precision: Any, dtype: Any
) -> jax.Array:
    """The gradient by x of a product of x and y, whose dims come as (batch, kept of lhs, kept of rhs)."""
    (x_contracted, y_contracted), (x_batch, y_batch) = dims
    x_kept = [dim for dim in range(x.ndim) if dim not in (*x_contracted, *x_batch)]
    y_kept = [dim for dim in range(y.ndim) if dim not in (*y_contracted, *y_batch)]
    first = len(x_batch) if is_rhs else len(x_batch) + len(x_kept)
    of_y = tuple(range(first, first + len(y_kept)))
    # What y had contracted stays in y's order. Of the two orders of the operands the one without a transpose of the
    # result: XLA folds such a transpose into a product that its CPU backend cannot run (seen in JAX 0.10.2).
    x_by_y = [x_dim for _, x_dim in sorted(zip(y_contracted, x_contracted, strict=True))]
    whole, order = tuple(range(len(x_batch))), [*x_batch, *x_kept, *x_by_y]
    multiply = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=dtype)
    if order == sorted(order):
        product = multiply(cotangent, y, ((of_y, y_kept), (whole, y_batch)))
    else:
        product, order = multiply(y, cotangent, ((y_kept, of_y), (y_batch, whole))), [*x_batch, *x_by_y, *x_kept]
    return jax.lax.transpose(product, [order.index(dim) for dim in range(x.ndim)]).astype(x.dtype)
