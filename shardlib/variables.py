"""A Flax model -> its parameters and collections: abstract, or made from a key; padded where a plan's rules say so.

In: a linen module, an NNX module or a factory of one, a batch spec. Out: trees, boxes and variables kept or not.

    create = creator(model, batch_spec, init=None)
    params, collections = abstract_variables(create)
"""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.core import meta

from meshes.errors import ShardingError
from shardlib import batch_spec as batches
from shardlib.annotate import VOCAB_SHARDS, Active


def abstract_parameters(model: Any, batch_spec: Any, *, init: Callable[..., Any] | None = None) -> Any:
    """The model's parameters as abstract arrays, boxes and NNX variables kept; nothing is allocated."""
    return abstract_variables(creator(model, batch_spec, init))[0]


def abstract_variables(create: Callable[[Any], Any]) -> Any:
    """What `creator`'s function makes, abstract.

    Raises:
        ShardingError: a model that asks for a mesh while it is made.
    """
    try:
        return jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)))
    except ValueError as error:
        if isinstance(error, ShardingError) or "mesh context" not in str(error):
            raise
        raise ShardingError(
            f"the model cannot be built without a mesh: {error}",
            fix="name axes with annotate.nnx_logical(init, ...): its metadata needs no mesh",
        ) from error


def creator(model: Any, batch_spec: Any, init: Callable[..., Any] | None) -> Callable[[Any], Any]:
    """PRNG key -> (the model's parameters, its other collections or None), boxes and variables included."""
    if isinstance(model, nn.Module):
        return lambda key: _linen_variables(model, key, batch_spec, init)
    if isinstance(model, nnx.Module):
        variables = _nnx_variables(model)
        return lambda key: variables
    if callable(model):
        return lambda key: _nnx_variables(_call_factory(model, key))
    raise ShardingError(
        f"{type(model).__name__} is not a Flax model",
        fix="give a linen module, an NNX module, or a callable that takes nnx.Rngs and returns an NNX module",
    )


def model_name(model: Any) -> str:
    """What errors call a model: its class, or the factory's name."""
    factory = getattr(model, "func", model)
    return getattr(factory, "__name__", type(model).__name__)


def unboxed(tree: Any) -> Any:
    """The tree with values in place of linen's boxes."""
    # Not nn.unbox: Flax's own boxes would apply their own constraints under an ambient mesh.
    is_box = lambda node: isinstance(node, meta.AxisMetadata)  # noqa: E731
    unbox = lambda node: getattr(node, "value", None) if is_box(node) else node  # noqa: E731
    return jax.tree.map(unbox, tree, is_leaf=is_box)


def padding(shards: int) -> Active:
    """In force while a model is made whose vocabularies the rules pad."""
    return Active(constrain=lambda x, names: x, ops={VOCAB_SHARDS: lambda: shards})


def padded(leaf: Any, like: Any) -> Any:
    """The array with zeros up to a shape."""
    widths = [(0, stored - size) for size, stored in zip(leaf.shape, like.shape, strict=True)]
    return jax.numpy.pad(leaf, widths) if any(after for _, after in widths) else leaf


def unpadded(leaf: Any, like: Any) -> Any:
    """The first entries, as many as a shape has."""
    return leaf if leaf.shape == like.shape else leaf[tuple(map(slice, like.shape))]


def _nnx_variables(module: nnx.Module) -> tuple[Any, Any]:
    """Parameters, and all other variables but random state, which the loss brings itself."""
    params, _, others = nnx.state(module, nnx.Param, nnx.RngState, ...)
    return params, others if jax.tree.leaves(others) else None


def _call_factory(factory: Callable[..., Any], key: Any) -> nnx.Module:
    module = factory(rngs=nnx.Rngs(key)) if "rngs" in _parameters(factory) else factory(nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise ShardingError(f"the model factory returned {type(module).__name__}, not an nnx.Module")
    return module


def _linen_variables(model: nn.Module, key: Any, batch_spec: Any, init: Callable[..., Any] | None) -> tuple[Any, Any]:
    params_key, dropout_key = jax.random.split(key)
    keys = {"params": params_key, "dropout": dropout_key}
    zeros = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), batches.abstract(batch_spec))
    variables = dict(init(keys, zeros) if init else model.init(keys, **_call_arguments(model, zeros, batch_spec)))
    params = variables.pop("params")
    return params, variables or None


def _call_arguments(model: nn.Module, batch: Any, batch_spec: Any) -> dict[str, Any]:
    """The batch entries that the module's call takes by name, or the spec's first entry for its first argument."""
    parameters = _parameters(type(model).__call__)
    names = [name for name in parameters if name != "self"]
    if isinstance(batch, dict):
        found = {name: batch[name] for name in names if name in batch}
        if found:
            return found
        if names and batch:
            return {names[0]: batch[next(iter(batch_spec))]}  # the batch itself went through JAX, which sorts keys
    raise ShardingError(
        f"{type(model).__name__}.__call__ takes ({', '.join(names)}), and the batch spec is no dict with such entries",
        fix="make batch_spec a dict with those names, or pass init=lambda keys, batch: model.init(keys, ...)",
    )


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
