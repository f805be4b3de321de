"""MODEL on the command line: an import string `package.module:callable` -> (module, loss, batch_spec).

In: text such as `models.gpt:small`. Out: what the callable returns, checked, or an error that offers near names.

    loaded = load("models.gpt:small")
"""

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

from meshes.errors import ShardingError, nearest
from shardlib.batch_spec import is_spec


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
    """
    found = import_object(text, what="MODEL", example="models.gpt:small")
    if not callable(found):
        raise ShardingError(
            f"MODEL {text!r} is not callable", fix="name a function that returns (module, loss, batch_spec)"
        )
    result = found()
    if not isinstance(result, tuple) or len(result) != 3:
        raise ShardingError(
            f"MODEL {text!r} returned {type(result).__name__}, not (module, loss, batch_spec)",
            fix="return the Flax module, the loss (params, batch, rng) and a dict of ArraySpec",
        )
    module, loss, batch_spec = result
    leaves = jax.tree.leaves(batch_spec, is_leaf=is_spec)
    if not leaves or not all(is_spec(leaf) for leaf in leaves):
        raise ShardingError(
            f"MODEL {text!r}: the batch spec must be made of ArraySpec",
            fix='return {"inputs": ArraySpec(shape=(16, 128), dtype="int32", axes=("batch", "length"))}',
        )
    return Loaded(name=text, module=module, loss=loss, batch_spec=batch_spec)


def import_object(text: str, *, what: str, example: str) -> Any:
    """The object that `module:name` names, with the nearest name offered when there is none."""
    module_name, colon, attribute = text.partition(":")
    if not colon or not module_name or not attribute:
        raise ShardingError(f"{what} {text!r} is not an import string", fix=f'write "module:name", such as {example}')
    module = _import(module_name, what, example)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = nearest(part, [name for name in dir(value) if not name.startswith("_")])
            raise ShardingError(f"{what} {text!r}: {module_name} has no {part!r}{near}", fix=f"try {example}")
        value = getattr(value, part)
    return value


def _import(name: str, what: str, example: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise ShardingError(
                f"{what}: importing {name!r} needs {error.name!r}, which is not installed",
                fix=f"pip install {error.name}",
            ) from None
        raise ShardingError(
            f"{what}: no module {name!r} in the current folder or installed",
            fix=f"run from the folder that holds it, or try {example}",
        ) from None
    except ShardingError:
        raise
    except Exception as error:  # the user's own file may fail in any way; say where, without our traceback
        place = _last_line(error)
        raise ShardingError(f"{what}: importing {name!r} failed{place}: {type(error).__name__}: {error}") from error


def _last_line(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}"
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
