"""Specs for optimizer state: what follows a parameter takes its spec, everything else is replicated; with reasons.

In: an optax optimizer, abstract parameters, their specs. Out: a tree of specs with the state's structure, and one
entry per array of the state. Checked against the state the optimizer really makes; nothing is allocated.

    specs = optimizer_specs(optax.adamw(1e-3), abstract_params, param_specs)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from meshes.shape import MeshShape
from shardlib.decide import Decision, Names, spec_of
from shardlib.spec_axes import axes_of, is_spec
from shardlib.specs import Entry, mesh_shape
from shardlib.state_dims import Origin, averaged_over, factored_dims, origins
from shardlib.tree_paths import leaves_with_paths, path_text


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry(Entry):
    """One array of an optimizer's state; a static leaf.

    Args:
        follows: path of the parameter whose spec it takes, or None.
        reason: why it has its spec, for the array as a whole; the decisions say it for each dim.
    """

    follows: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateResolution:
    """Specs of an optimizer's state with everything that led to them; a static value.

    Args:
        specs: a pytree of `PartitionSpec` with the structure of the state.
        entries: one per array of the state, in tree order.
        notices: what a user should know although it is legal.
    """

    specs: Any
    entries: tuple[StateEntry, ...]
    notices: tuple[str, ...]


def abstract_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """The optimizer's state for these parameters as `jax.ShapeDtypeStruct`s; nothing is allocated."""
    return jax.eval_shape(optimizer.init, params)


def optimizer_specs(optimizer: optax.GradientTransformation, params: Any, specs: Any) -> Any:
    """Derives the specs of the optimizer's state; see `resolve_state` for the rules and the reasons.

    Args:
        optimizer: anything with optax's `init` and `update`.
        params: parameters or their abstract values.
        specs: partition specs of the parameters' structure.
    """
    state = _State.of(optimizer, params)
    return jax.tree.unflatten(state.treedef, [found.spec for found in state.decided(params, specs, names=())])


def resolve_state(
    optimizer: optax.GradientTransformation,
    params: Any,
    specs: Any,
    *,
    mesh: Mesh | AbstractMesh | MeshShape | str,
    names: Sequence[Names] = (),
) -> StateResolution:
    """Derives specs and reasons for every array of an optimizer's state.

    What belongs to a parameter is found by optax's own map over parameter-like trees (`optax.tree.map_params`), and
    for transforms that it cannot map, by path and then by shape. An array of the parameter's shape takes its spec;
    one with fewer dims (Adafactor's averages) takes the spec of the dims it keeps; a dim that could be either of two
    dims with other mesh axes stays whole. The rest, counters and hyperparameters, is replicated.

    Args:
        optimizer: anything with optax's `init` and `update`.
        params: parameters or their abstract values.
        specs: partition specs of the parameters' structure.
        mesh: what the axes of the specs refer to.
        names: logical axes of every parameter, in tree order; by default none.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((128, 256), "float32")}
        >>> found = resolve_state(optax.adafactor(1e-3), params, {"w": P("fsdp", "tensor")}, mesh="fsdp=4,tensor=2")
        >>> [(entry.path, entry.spec, entry.reason) for entry in found.entries if "v_col" in entry.path]
        [('0/v_col/w', PartitionSpec('tensor',), 'follows w')]
    """
    shape, state = mesh_shape(mesh), _State.of(optimizer, params)
    entries: list[StateEntry] = []
    for (path, leaf), found in zip(state.leaves, state.decided(params, specs, names=names), strict=True):
        split = [axis for decision in found.decisions for axis in decision.mesh_axes]
        entries.append(
            StateEntry(
                path=path_text(path),
                shape=leaf.shape,
                dtype=str(leaf.dtype),
                names=tuple(decision.name for decision in found.decisions),
                spec=found.spec,
                decisions=found.decisions,
                num_shards=math.prod(shape.size(axis) for axis in split),
                follows=found.follows,
                reason=found.reason,
            )
        )
    notices = [
        f"optimizer state {entry.path} {list(entry.shape)}: {decision.remark} ({entry.bytes_per_device:,} bytes on "
        "each device)"
        for entry in entries
        for decision in entry.decisions
        if decision.remark
    ]
    unchanged = raw_updates(optimizer, params)
    if unchanged:
        notices.append(
            f"the optimizer adds the raw gradient to {', '.join(unchanged)}: optax.masked passes on what it does not "
            "transform; fix: freeze them with shardlib.trainable.freeze(optimizer, mask), or transform them too"
        )
    specs = jax.tree.unflatten(state.treedef, [entry.spec for entry in entries])
    return StateResolution(specs=specs, entries=tuple(entries), notices=tuple(notices))


def raw_updates(optimizer: optax.GradientTransformation, params: Any) -> tuple[str, ...]:
    """Paths of the parameters whose update is their gradient itself, where the optimizer masks anything.

    Read off the traced update: an output that is an input. A gradient that was only clipped is not found.
    """
    state = abstract_state(optimizer, params)
    is_masked = lambda node: isinstance(node, optax.MaskedState)  # noqa: E731
    if not any(map(is_masked, jax.tree.leaves(state, is_leaf=is_masked))):
        return ()
    paths = [path for path, _ in leaves_with_paths(params)]
    update = lambda grads, state, params: optimizer.update(grads, state, params)[0]  # noqa: E731
    try:
        jaxpr = jax.make_jaxpr(update)(params, state, params).jaxpr
    except TypeError:  # its update takes more than gradients, state and parameters, such as the loss
        return ()
    given = {id(variable): path for variable, path in zip(jaxpr.invars, paths, strict=False)}
    return tuple(given[id(variable)] for variable in jaxpr.outvars if id(variable) in given)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The abstract state, and which parameter each array of it follows.

    Args:
        leaves: (key path, abstract array), in tree order.
        treedef: structure of the state.
        follows: for each leaf the index of its parameter, or None.
        averaged: Adafactor's statistics by leaf: "v_row", "v_col" or "v".
        unmapped: why optax's map could not be used, or None.
    """

    leaves: list[tuple[Any, Any]]
    treedef: Any
    follows: list[int | None]
    averaged: dict[int, str]
    unmapped: str | None

    @classmethod
    def of(cls, optimizer: optax.GradientTransformation, params: Any) -> "_State":
        state = abstract_state(optimizer, params)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
        parameters = [tuple(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        unmapped = None
        try:
            follows = _by_optax(optimizer, treedef, parameters)
        except Exception as error:  # init is the user's code, and meets a placeholder here
            unmapped = f"optax's map failed with {type(error).__name__}"
            follows = [_by_path(path, parameters) for path, _ in leaves]
        return cls(
            leaves=leaves, treedef=treedef, follows=follows, averaged=_factored_statistics(state), unmapped=unmapped
        )

    def decided(self, params: Any, specs: Any, *, names: Sequence[Names]) -> list["_Found"]:
        """What becomes of each array of the state."""
        abstract = leaves_with_paths(params)
        flat_specs = jax.tree.leaves(specs, is_leaf=is_spec)
        names = names or [(None,) * len(leaf.shape) for _, leaf in abstract]
        known = [
            _Parameter(path=path, shape=tuple(leaf.shape), names=own, spec=spec)
            for (path, leaf), spec, own in zip(abstract, flat_specs, names, strict=True)
        ]
        return [self._find(index, tuple(leaf.shape), known) for index, (_, leaf) in enumerate(self.leaves)]

    def _find(self, index: int, shape: tuple[int, ...], known: list["_Parameter"]) -> "_Found":
        followed = self.follows[index]
        if followed is not None:
            parameter = known[followed]
            if shape == () != parameter.shape:
                return _replicated(shape, f"one number for {parameter.path}: replicated", follows=parameter.path)
            dims = _statistic(self.averaged[index], shape, parameter.shape) if index in self.averaged else None
            how = f" by path ({self.unmapped})" if self.unmapped else ""
            return _following(shape, parameter, dims, f"follows {parameter.path}{how}")
        alike = [parameter for parameter in known if parameter.shape == shape and math.prod(shape) > 1]
        if not self.unmapped or not alike:
            return _replicated(shape, "a scalar: replicated" if shape == () else "follows no parameter: replicated")
        if len({parameter.axes for parameter in alike}) == 1:
            return _following(shape, alike[0], None, f"follows {alike[0].path} by shape ({self.unmapped})")
        reason = f"{len(alike)} parameters have this shape and other specs, and no path tells which: replicated"
        return _replicated(shape, reason, remark=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    spec: P
    decisions: tuple[Decision, ...]
    follows: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    path: str
    shape: tuple[int, ...]
    names: Names
    spec: P

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """Mesh axes per dim; a spec may be shorter than the array."""
        entries = map(axes_of, self.spec)
        return (*entries, *[()] * (len(self.shape) - len(self.spec)))


def _by_optax(optimizer: Any, treedef: Any, parameters: list[tuple[Any, ...]]) -> list[int | None]:
    """optax's own map, given each parameter-like tree whole: its leaves follow the parameter at their path."""
    follows: list[int | None] = [None] * treedef.num_leaves
    numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))

    def follow(tree: Any) -> Any:
        for path, number in jax.tree_util.tree_flatten_with_path(tree)[0]:
            # One parameter may have several arrays below its path (SM3 keeps one per dim).
            follows[number] = next(i for i, own in enumerate(parameters) if path[: len(own)] == own)
        return tree

    def mapped() -> None:
        optax.tree.map_params(
            optimizer, follow, numbered, transform_non_params=lambda leaf: leaf, is_leaf=lambda _: True
        )

    # optax runs the optimizer's init on a placeholder: traced, so that it touches no device.
    jax.eval_shape(mapped)
    return follows


def _by_path(path: tuple[Any, ...], parameters: list[tuple[Any, ...]]) -> int | None:
    """The parameter whose keys appear in this path in order; of several the longest, then unbroken, then latest."""
    found = [
        (len(own), at[-1] - at[0] == len(own) - 1, at[-1], index)
        for index, own in enumerate(parameters)
        if (at := _positions(path, own))
    ]
    return max(found)[-1] if found else None


def _positions(path: tuple[Any, ...], own: tuple[Any, ...]) -> list[int]:
    """Where a parameter's keys are in the path, matched from the end; empty unless all are there in order."""
    at: list[int] = []
    end = len(path)
    for key in reversed(own):
        end = next((i for i in reversed(range(end)) if path[i] == key), -1)
        if end < 0:
            return []
        at.insert(0, end)
    return at


def _factored_statistics(state: Any) -> dict[int, str]:
    """Which leaves are the statistics of an `optax.FactoredState`, whose averaged dims only their field tells."""
    is_factored = lambda node: isinstance(node, optax.FactoredState)  # noqa: E731
    fields: dict[int, str] = {}
    first = 0
    for node in jax.tree.leaves(state, is_leaf=is_factored):
        if not isinstance(node, optax.FactoredState):
            first += 1
            continue
        for field in optax.FactoredState._fields:
            size = len(jax.tree.leaves(getattr(node, field)))
            if field != "count":
                fields.update((number, field) for number in range(first, first + size))
            first += size
    return fields


def _statistic(field: str, shape: tuple[int, ...], parameter: tuple[int, ...]) -> tuple[Origin, ...] | None:
    """Origins of one of Adafactor's statistics; None for a whole second moment."""
    dims = factored_dims(parameter)
    averaged = None if dims is None or field == "v" else dims[1] if field == "v_row" else dims[0]
    if averaged is not None and shape == (*parameter[:averaged], *parameter[averaged + 1 :]):
        return averaged_over(averaged, parameter)
    return (Origin(candidates=(), reason="a placeholder"),) if shape == (1,) != parameter else None


def _following(shape: tuple[int, ...], parameter: _Parameter, dims: tuple[Origin, ...] | None, reason: str) -> _Found:
    decisions: list[Decision] = []
    for dim, (size, origin) in enumerate(zip(shape, dims or origins(shape, parameter.shape), strict=True)):
        axes = {parameter.axes[candidate] for candidate in origin.candidates}
        names = {parameter.names[candidate] for candidate in origin.candidates}
        clash = f"{origin.reason}, which have other specs: whole" if len(axes) > 1 else None
        decisions.append(
            Decision(
                dim=dim,
                name=next(iter(names)) if len(names) == 1 else None,
                size=size,
                mesh_axes=next(iter(axes)) if len(axes) == 1 else (),
                reason=clash or f"{origin.reason} of {parameter.path}",
                remark=clash,
            )
        )
    split = any(decision.mesh_axes for decision in decisions)
    spec = parameter.spec if shape == parameter.shape else spec_of(tuple(decisions)) if split else P()
    return _Found(spec=spec, decisions=tuple(decisions), follows=parameter.path, reason=reason)


def _replicated(
    shape: tuple[int, ...], reason: str, *, follows: str | None = None, remark: str | None = None
) -> _Found:
    decisions = tuple(
        Decision(dim=dim, name=None, size=size, reason=reason, remark=remark if dim == 0 else None)
        for dim, size in enumerate(shape)
    )
    return _Found(spec=P(), decisions=decisions, follows=follows, reason=reason)
