"""What commands read from their options: rules files, optimizers, mesh and model together.

In: option text. Out: values of the library, or one error that names the option's file or text.

    bound = bind_model(load("models.gpt:small"), mesh=MeshShape.parse("data=8"), rules=None)
"""

from pathlib import Path
from typing import Any

import optax

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib.batch_spec import resized
from shardlib.binding import Bound, bind
from shardlib.cli.model import Loaded, import_object
from shardlib.plan import Plan
from shardlib.rules import Rules
from shardlib.strategies import default_rules


def read_rules(path: Path | None) -> Rules:
    """The rules in a TOML file, or the default rules.

    Raises:
        ShardingError: no such file, not text, or any mistake in it.
    """
    if path is None:
        return default_rules()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ShardingError(f"--rules {path}: no such file", fix='write one with rules = ["batch -> data"]') from None
    except (OSError, UnicodeDecodeError) as error:
        raise ShardingError(f"--rules {path}: cannot be read: {error}") from None
    return Rules.from_toml(text, base=default_rules(), source=f"--rules {path}")


def optimizer_from(text: str, learning_rate: float) -> optax.GradientTransformation:
    """An optimizer by import string (`optax:adamw`), called with the learning rate.

    Raises:
        ShardingError: it does not resolve, or does not build an optimizer from a learning rate.
    """
    make = import_object(text if ":" in text else f"optax:{text}", what="--optimizer", example="optax:adamw")
    try:
        optimizer = make(learning_rate)
    except Exception as error:  # anything may go wrong in a user's factory; it is named, not traced
        raise ShardingError(
            f"--optimizer {text!r} cannot be built from a learning rate: {type(error).__name__}: {error}",
            fix="name a function learning_rate -> optax optimizer",
        ) from error
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ShardingError(
            f"--optimizer {text!r} built {type(optimizer).__name__}, not an optax optimizer",
            fix="name a function learning_rate -> optax optimizer, such as optax:adamw",
        )
    return optimizer


def sized(model: Loaded, *, batch: int | None, length: int | None) -> Any:
    """The model's batch spec at the sizes of `--batch` and `--length`."""
    sizes = {"batch": batch, "length": length}
    return resized(model.batch_spec, **{axis: size for axis, size in sizes.items() if size is not None})


def bind_model(model: Loaded, *, mesh: MeshShape, rules: Rules, batch_spec: Any) -> Bound:
    """The model bound under a plan made of the options."""
    return bind(model.module, model.loss, Plan(mesh=mesh, rules=rules), batch_spec)
