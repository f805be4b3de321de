"""What commands read from their options: rules files, optimizers, mesh and model together.

In: option text. Out: values of the library, or one error that names the option's file or text.

    bound = bind_model(load("models.gpt:small"), plan=Plan(mesh="data=8"), batch_spec=spec)
"""

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import optax

from meshes.errors import ShardingError
from meshes.shape import INFERRED, MeshShape
from shardlib.batch_spec import resized
from shardlib.binding import Bound, bind
from shardlib.cli.microbatches import provisional
from shardlib.cli.model import Loaded, import_object
from shardlib.cli.plan_options import OF_AXES
from shardlib.cli.user_code import user_code
from shardlib.explanation import Explanation
from shardlib.plan import STAGE, Plan
from shardlib.rules import Rules
from shardlib.strategies import default_rules
from shardlib.variables import abstract_parameters

_BATCH: Final = re.compile(r"'batch': size ([0-9]+) not divisible by ([a-z_A-Z0-9= ]+)")
_MICROBATCHES: Final = re.compile(r"fix: [a-z0-9_]+ with stages=[0-9]+, chunks=([0-9]+), microbatches=([0-9]+)")
_UNRULED: Final = re.compile(r"no rule names the logical axis '([^']+)'")


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
        fix = 'write one with rules = ["batch -> data"]'
        raise ShardingError(f"--rules {path}: no such file{_near_file(path)}", fix=fix) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ShardingError(
            f"--rules {path}: cannot be read: {reason}", fix='name a TOML file with rules = ["batch -> data"]'
        ) from None
    return Rules.from_toml(text, base=default_rules(), source=f"--rules {path}")


def _near_file(path: Path) -> str:
    """The nearest name in the folder, extensions aside: all rules files end alike."""
    try:
        stems = {file.stem: file.name for file in path.parent.iterdir()}
    except OSError:
        return ""
    close = difflib.get_close_matches(path.stem, list(stems), n=1)
    return f" (did you mean {stems[close[0]]!r}?)" if close else ""


def optimizer_from(text: str, learning_rate: float, *, clip: float | None = None) -> optax.GradientTransformation:
    """An optimizer by import string (`optax:adamw`) at a learning rate; `clip` bounds the gradients' global norm.

    Raises:
        ShardingError: it does not resolve, or does not build an optimizer from a learning rate.
    """
    what, fix = f"--optimizer {text!r}", "name a function learning_rate -> optax optimizer, such as adamw"
    make = import_object(text if ":" in text else f"optax:{text}", what="--optimizer", example="optax:adamw")
    if not callable(make):
        raise ShardingError(f"{what} is not a function", fix=fix)
    try:
        with user_code(what):
            optimizer = make(learning_rate)
    except TypeError as error:  # raised by the call itself, not inside: another signature
        raise ShardingError(f"{what} cannot be built from a learning rate: {error}", fix=fix) from error
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ShardingError(f"{what} built {type(optimizer).__name__}, not an optax optimizer", fix=fix)
    return optimizer if clip is None else optax.chain(optax.clip_by_global_norm(clip), optimizer)


def sized(model: Loaded, *, batch: int | None, length: int | None) -> Any:
    """The model's batch spec at the sizes of `--batch` and `--length`."""
    sizes = {"batch": batch, "length": length}
    return resized(model.batch_spec, **{axis: size for axis, size in sizes.items() if size is not None})


def parameters_of(model: Loaded, batch_spec: Any) -> Any:
    """The model's abstract parameters; the first time that the user's module runs."""
    with user_code(f"MODEL {model.name!r}"):
        return abstract_parameters(model.module, batch_spec)


def plan_from(mesh: str | None, *, file: Path | None, rules: Path | None, changes: dict[str, Any]) -> Plan:
    """The plan of a command: the file's, or the mesh's with default rules, changed by the other options.

    Raises:
        ShardingError: neither a mesh nor a file, a file that cannot be read, or options that do not go together.
    """
    if mesh is None and file is None:
        raise ShardingError("no mesh was named", fix="--mesh data=2,tensor=4, or --plan FILE")
    shape = None if mesh is None else MeshShape.parse(mesh)
    if shape is not None:
        _check_stages(shape, changes)
    own_rules = None if rules is None and file is not None else read_rules(rules)
    if file is None:
        assert shape is not None and own_rules is not None
        return _made(lambda: Plan(mesh=shape, rules=own_rules, **{**provisional(shape), **changes}))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ShardingError(f"--plan {file}: cannot be read: {reason}", fix='write {"mesh": "data=8"} there') from None
    try:
        plan = Plan.from_json(text)
    except ShardingError as error:
        raise ShardingError(f"--plan {file}: {error}") from None
    if shape is not None:
        changes = {**changes, "mesh": shape}
    if own_rules is not None:
        changes = {**changes, "rules": own_rules}
    return _made(lambda: replace(plan, **changes))


def changes_per_mesh(changes: dict[str, Any], meshes: Sequence[str | None]) -> list[dict[str, Any]]:
    """The changes of a plan for each mesh: what is for one axis goes to the meshes that have it, where some have."""
    axes = [() if mesh is None else MeshShape.parse(mesh).names for mesh in meshes]
    elsewhere = {name: axis for axis, options in OF_AXES.items() for name in options if axis in set().union(*axes)}
    return [{name: value for name, value in changes.items() if elsewhere.get(name) in (None, *names)} for names in axes]


def _check_stages(shape: MeshShape, changes: dict[str, Any]) -> None:
    """Raises for a mesh whose number of stages is open, and for pipeline options without stages."""
    sizes = dict(zip(shape.names, shape.sizes, strict=True))
    if sizes.get(STAGE) == INFERRED:
        raise ShardingError(
            f"mesh {shape}: the number of stages decides the schedule, so it cannot be what devices leave",
            fix="name it: stage=4, and leave -1 to another axis",
        )
    options = [f"--{name}" for name in OF_AXES[STAGE] if name in changes]
    if options and sizes.get(STAGE, 1) == 1:
        raise ShardingError(
            f"{', '.join(options)}: for a pipeline, and mesh {shape} has no stages",
            fix="--mesh stage=4,data=2, or leave it out",
        )


def _made(make: Callable[[], Plan]) -> Plan:
    """A plan, or its error with the option that repairs it."""
    try:
        return make()
    except ShardingError as error:
        found = _MICROBATCHES.search(str(error))
        if found is None:
            raise
        what, _, _ = str(error).partition("\n  fix: ")
        fix = f"--microbatches {found[2]}" if "does not divide" in what else f"--chunks {found[1]}, or leave it out"
        raise ShardingError(what, fix=fix) from None


def one_device(plan: Plan) -> Plan:
    """The plan's computation on one device: the same precision, and the same parts of the batch with their keys."""
    parts = plan.num_microbatches
    if plan.chosen_lowering[0] == "explicit":
        parts *= plan.num_batch_shards
    slices = plan.random_slices or parts
    return Plan(
        mesh=MeshShape.parse("data=1"),
        rules=plan.rules,
        compute_dtype=plan.compute_dtype,
        lowering="automatic",
        reduce_dtype=plan.compute_dtype,
        random_slices=slices if slices > 1 else None,
    )


def bind_model(model: Loaded, *, plan: Plan, batch_spec: Any) -> Bound:
    """The model bound under a plan made of the options.

    Raises:
        ShardingError: what `bind` raises, with the option that repairs it where there is one.
    """
    try:
        with user_code(f"MODEL {model.name!r}"):
            return bind(model.module, model.loss, plan, batch_spec)
    except ShardingError as error:
        fix = _option_fix(str(error), plan.rules)
        if fix is None:
            raise
        raise ShardingError(str(error), fix=fix) from error


def explained(bound: Bound, optimizer: optax.GradientTransformation, *, name: str) -> Explanation:
    """The explanation with the bytes of this optimizer."""
    with user_code(f"--optimizer {name!r}"):
        return bound.explain(optimizer)


def _option_fix(message: str, rules: Rules) -> str | None:
    """The option that repairs what the library complains about, where there is one."""
    unruled = set(_UNRULED.findall(message))
    defaults = {rule.logical for rule in default_rules().rules}
    if unruled & defaults - {rule.logical for rule in rules.rules}:
        return 'start the rules file with extends = "default", which has rules for these axes'
    batch = _BATCH.search(message)
    if batch:
        size, shards = int(batch[1]), math.prod(int(part.partition("=")[2]) for part in batch[2].split(" x "))
        return f"--batch {max(1, round(size / shards)) * shards}"
    return None
