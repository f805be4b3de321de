"""MODEL on the command line: an import string `package.module:callable` -> (module, loss, batch_spec).

In: text such as `models.gpt:small`. Out: what the callable returns, checked, or an error that offers near names.

    loaded = load("models.gpt:small")
"""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from meshes.errors import ShardingError, nearest
from shardlib.batch_spec import is_spec
from shardlib.cli.user_code import missing, user_code

EXAMPLE = "shardlib.examples.tiny:tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a MODEL import string stands for; a static value."""

    name: str
    module: Any
    loss: Any
    batch_spec: Any


def load(text: str) -> Loaded:
    """Imports and calls MODEL.

    Raises:
        ShardingError: no such module or name, not a callable, or it does not return (module, loss, batch_spec).
        MissingDependency: it imports a module that is not installed.
    """
    found, what = import_object(text, what="MODEL", example=EXAMPLE), f"MODEL {text!r}"
    if not callable(found):
        raise ShardingError(
            f"{what} is {_article(found)}, not a function",
            fix="name a function that returns (module, loss, batch_spec)",
        )
    problem = _call_problem(found)
    if problem:
        raise ShardingError(
            f"{what} cannot be called without arguments: {problem}",
            fix="give them defaults, or name a function that calls it: def small(): return ...",
        )
    with user_code(what):
        result = found()
    if not isinstance(result, tuple) or len(result) != 3:
        shape = f"a tuple of {len(result)}" if isinstance(result, tuple) else _article(result)
        raise ShardingError(
            f"{what} returned {shape}, not (module, loss, batch_spec)",
            fix="return the Flax module, the loss (params, batch, rng) and a dict of ArraySpec",
        )
    module, loss, batch_spec = result
    _check_module(what, module)
    _check_loss(what, loss)
    leaves = jax.tree.leaves(batch_spec, is_leaf=is_spec)
    if not leaves or not all(is_spec(leaf) for leaf in leaves):
        raise ShardingError(
            f"{what}: the batch spec, its third value, must be made of ArraySpec",
            fix='return {"inputs": ArraySpec(shape=(16, 128), dtype="int32", axes=("batch", "length"))}',
        )
    return Loaded(name=text, module=module, loss=loss, batch_spec=batch_spec)


def import_object(text: str, *, what: str, example: str) -> Any:
    """The object that `module:name` names, with the nearest name offered when there is none."""
    module_name, colon, attribute = text.partition(":")
    if not colon or not module_name or not attribute:
        head, dot, tail = text.rpartition(".")
        fix = f'write "{head}:{tail}"' if dot and head and tail.isidentifier() and tail != "py" else None
        raise ShardingError(
            f"{what} {text!r} is not an import string, module:name",
            fix=fix or f'write "module:name", such as {example}',
        )
    if not all(part.isidentifier() for part in module_name.split(".")) or module_name.endswith(".py"):
        stem = module_name.replace("\\", "/").removesuffix(".py").lstrip("./").replace("/", ".")
        plausible = all(part.isidentifier() for part in stem.split("."))
        fix = f'write "{stem}:{attribute}", from the folder that holds it' if plausible else f"write such as {example}"
        raise ShardingError(f"{what} {text!r}: {module_name!r} is not the name of a module", fix=fix)
    module = _import(module_name, what, example)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = nearest(part, [name for name in dir(value) if not name.startswith("_")])
            fix = f"correct the name, or try {example}"
            raise ShardingError(f"{what} {text!r}: {module_name} has no {part!r}{near}", fix=fix)
        value = getattr(value, part)
    return value


def _import(name: str, what: str, example: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        with user_code(f"{what}: importing {name!r}"):
            return importlib.import_module(name)
    except Exception as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
            raise
        if not (name == cause.name or name.startswith(cause.name + ".")):
            raise missing(f"{what}: {name!r}", cause) from None
        raise ShardingError(
            f"{what}: no module {name!r} in the current folder or installed{_near_module(name)}",
            fix=f"run from the folder that holds it, or try {example}",
        ) from None


def _near_module(name: str) -> str:
    """The nearest module beside where this one would be."""
    parent, _, _ = name.rpartition(".")
    if not parent:
        here = [info.name for info in pkgutil.iter_modules([str(Path.cwd())])]
        return nearest(name, [*here, "models", "shardlib"])
    try:
        package = importlib.import_module(parent)
    except Exception:  # the parent is missing too, or broken: there is nothing to offer
        return ""
    return nearest(name, [f"{parent}.{info.name}" for info in pkgutil.iter_modules(getattr(package, "__path__", []))])


def _check_module(what: str, module: Any) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ShardingError(
            f"{what} returned the class {module.__name__}, not a module", fix=f"return {module.__name__}(...)"
        )
    if not isinstance(module, nn.Module | nnx.Module) and not callable(module):
        raise ShardingError(
            f"{what}: its first value is {_article(module)}, not a Flax model",
            fix="return a linen module, an NNX module, or a function of nnx.Rngs that returns an NNX module",
        )


def _check_loss(what: str, loss: Any) -> None:
    if not callable(loss):
        raise ShardingError(
            f"{what}: its second value is {_article(loss)}, not a loss",
            fix="return a function loss(params, batch, rng)",
        )
    problem = _call_problem(loss, 3)
    # With running statistics a loss takes them too; `bind` knows whether the model has any.
    if problem and _call_problem(loss, 4):
        raise ShardingError(
            f"{what}: its loss cannot be called as loss(params, batch, rng): {problem}",
            fix="def loss(params, batch, rng): ...",
        )


def _call_problem(function: Callable[..., Any], num_arguments: int = 0) -> str | None:
    """Why the function does not take so many positional arguments, or None when it does or nobody knows."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*range(num_arguments))
    except TypeError as error:
        return str(error)
    return None


def _article(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
