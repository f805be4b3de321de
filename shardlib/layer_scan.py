"""Finds the layers of a traced loss: scans over stacked parameters that carry activations; rewrites them.

In: a closed jaxpr and where each of its inputs comes from. Out: `LayerScan`s, or the jaxpr with each of them replaced.

    closed = jax.make_jaxpr(loss)(params, batch, rng)
    found = layer_scans(closed, sources(params, batch, rng))
"""

import enum
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal, Var, jaxprs_in_params

from shardlib.jax_compat import called, is_checkpoint, opened, renamed, scan_signature, with_jaxpr

_PRODUCTS = ("dot_general", "conv_general_dilated")


class Source(enum.Flag):
    """What a value is computed from; neither for constants, keys and state."""

    NEITHER = 0
    PARAMS = enum.auto()
    BATCH = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScan:
    """A scan equation and where its inputs come from; a static value.

    Args:
        equation: the scan.
        inputs: the source of every input of the body: constants, carries (as they are in the loop), slices.
        initial: the sources of the initial carries.
    """

    equation: Any
    inputs: tuple[Source, ...]
    initial: tuple[Source, ...]

    @property
    def body(self) -> Any:
        """The body as an open jaxpr."""
        return opened(self.equation.params["jaxpr"])

    @property
    def length(self) -> int:
        """How many layers."""
        return self.equation.params["length"]

    @property
    def stacked(self) -> tuple[bool, ...]:
        """For every sliced input, whether it is made from parameters alone."""
        return tuple(_only_params(source) for source in self.inputs[sum(scan_signature(self.equation)) :])

    @property
    def runs_layers(self) -> bool:
        """Whether parameters are sliced and a carry starts from an input.

        A loop over chunks of a vocabulary slices parameters too, but its carry starts from constants.
        """
        return any(self.stacked) and any(self.initial)

    def with_body(self, body: Any) -> Any:
        """The equation with another open body of the same inputs and outputs."""
        params = self.equation.params
        return self.equation.replace(params={**params, "jaxpr": with_jaxpr(params["jaxpr"], body)})


def sources(params: Any, batch: Any, *rest: Any) -> list[Source]:
    """The source of every leaf of a loss's arguments."""
    leaves = [(params, Source.PARAMS), (batch, Source.BATCH), (rest, Source.NEITHER)]
    return [source for tree, source in leaves for _ in jax.tree.leaves(tree)]


def layer_scans(closed: Any, inputs: list[Source]) -> list[LayerScan]:
    """The layer scans of a program, in its order, wherever they are nested; see `rewrite` for which these are."""
    found: list[LayerScan] = []

    def note(scan: LayerScan) -> Any:
        found.append(scan)
        return scan.equation

    _walk(opened(closed), inputs, note)
    return found


def rewrite(closed: Any, inputs: list[Source], replace: Callable[[LayerScan], Any]) -> Any:
    """The program with `replace(scan)` for each layer scan, and without the `jax.checkpoint`s around them.

    A layer scan is the outermost scan that `runs_layers`; one that only repeats an inner one (`nn.remat_scan`) is not.

    Args:
        closed: a closed jaxpr.
        inputs: the source of each of its inputs.
        replace: from a layer scan to the equation in its place.
    """
    jaxpr, _, _ = _walk(opened(closed), inputs, replace)
    return with_jaxpr(closed, jaxpr)


def without_checkpoints(jaxpr: Any) -> Any:
    """An open jaxpr with the equations of each `jax.checkpoint` in its place; those within loops stay.

    A checkpoint in a loop inside a layer (attention by chunks) bounds what that loop stores, whatever the layer does.
    """
    equations = []
    for equation in jaxpr.eqns:
        for key, index, inner in _branches(equation):
            equation = _with_branch(equation, key, index, without_checkpoints(inner))
        equations.append(equation)
    jaxpr = jaxpr.replace(eqns=equations)
    return _inlined(jaxpr, [is_checkpoint(equation) for equation in equations])


def equations_within(jaxpr: Any, *, skip: Collection[int] = ()) -> Iterator[Any]:
    """Every equation of a jaxpr and of the jaxprs inside it, but for those with an `id` to skip."""
    for equation in opened(jaxpr).eqns:
        if id(equation) not in skip:
            yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from equations_within(inner, skip=skip)


def _walk(jaxpr: Any, inputs: Any, replace: Callable[[LayerScan], Any]) -> tuple[Any, list[Source], bool]:
    """An open jaxpr rewritten, the sources of its outputs, and whether it holds a layer scan."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    equations, around = [], []
    any_found = False
    for equation in jaxpr.eqns:
        given = [_source(known, atom) for atom in equation.invars]
        walk = _walk_scan if equation.primitive.name == "scan" else _walk_branches
        new, made, found = walk(equation, given, replace)
        known.update(zip(equation.outvars, made, strict=True))
        equations.append(new)
        around.append(found and is_checkpoint(new))
        any_found |= found
    outputs = [_source(known, atom) for atom in jaxpr.outvars]
    if any_found:
        jaxpr = _inlined(jaxpr.replace(eqns=equations), around)
    return jaxpr, outputs, any_found


def _walk_branches(equation: Any, given: list[Source], replace: Any) -> tuple[Any, list[Source], bool]:
    """Calls and conditionals by their jaxprs; for any other equation each output is made from all inputs."""
    branches = list(_branches(equation))
    if not branches:
        return equation, [_union(given)] * len(equation.outvars), False
    made, any_found = [Source.NEITHER] * len(equation.outvars), False
    for key, index, inner in branches:
        jaxpr, outputs, found = _walk(inner, given[len(given) - len(inner.invars) :], replace)
        made = [a | b for a, b in zip(made, outputs, strict=True)]
        any_found |= found
        equation = _with_branch(equation, key, index, jaxpr) if found else equation
    return equation, made, any_found


def _walk_scan(equation: Any, given: list[Source], replace: Any) -> tuple[Any, list[Source], bool]:
    num_consts, num_carry = scan_signature(equation)
    body, first = opened(equation.params["jaxpr"]), given[num_consts : num_consts + num_carry]
    inside, inner = list(given), []

    def note(scan: LayerScan) -> Any:
        inner.append(scan)
        return scan.equation

    while True:  # a carry is also made from what the body makes of it
        inner.clear()
        _, made, _ = _walk(body, inside, note)
        carry = [a | b for a, b in zip(inside[num_consts : num_consts + num_carry], made, strict=False)]
        if carry == inside[num_consts : num_consts + num_carry]:
            break
        inside[num_consts : num_consts + num_carry] = carry
    scan = LayerScan(equation=equation, inputs=tuple(inside), initial=tuple(first))
    if scan.runs_layers and not _only_repeats(body, inner):
        return replace(scan), made, True
    if not inner:
        return equation, made, False
    jaxpr, _, _ = _walk(body, inside, replace)
    return scan.with_body(jaxpr), made, True


def _only_repeats(body: Any, inner: list[LayerScan]) -> bool:
    """Whether all products of a body are within its inner layer scans."""
    rest = equations_within(body, skip={id(scan.equation) for scan in inner})
    return bool(inner) and not any(equation.primitive.name in _PRODUCTS for equation in rest)


def _branches(equation: Any) -> Iterator[tuple[str, int | None, Any]]:
    """The open jaxprs that run at most once on the last inputs of an equation, and where its parameters hold them."""
    key = called(equation)
    if key is not None:
        yield key, None, opened(equation.params[key])
    elif equation.primitive.name == "cond":
        for index, branch in enumerate(equation.params["branches"]):
            yield "branches", index, opened(branch)


def _with_branch(equation: Any, key: str, index: int | None, jaxpr: Any) -> Any:
    held = equation.params[key]
    if index is None:
        return equation.replace(params={**equation.params, key: with_jaxpr(held, jaxpr)})
    branches = tuple(with_jaxpr(old, jaxpr) if i == index else old for i, old in enumerate(held))
    return equation.replace(params={**equation.params, key: branches})


def _inlined(jaxpr: Any, chosen: list[bool]) -> Any:
    """An open jaxpr with the equations of each chosen call in its place."""
    if not any(chosen):
        return jaxpr
    names: dict[Any, Any] = {}
    equations = []
    for equation, is_chosen in zip(jaxpr.eqns, chosen, strict=True):
        equation = renamed(equation, lambda atom: _read(names, atom), outputs=equation.outvars)
        if not is_chosen:
            equations.append(equation)
            continue
        inner = opened(equation.params["jaxpr"])
        assert not inner.constvars, "a checkpoint takes its constants as inputs"
        # Fresh variables: JAX shares one jaxpr between equal calls, and both may be inlined here.
        local = dict(zip(inner.invars, equation.invars, strict=True))
        for own in inner.eqns:
            fresh = [Var(var.aval) for var in own.outvars]
            equations.append(renamed(own, lambda atom, local=local: _read(local, atom), outputs=fresh, caller=equation))
            local.update(zip(own.outvars, fresh, strict=True))
        names.update(zip(equation.outvars, (_read(local, atom) for atom in inner.outvars), strict=True))
    return jaxpr.replace(eqns=equations, outvars=[_read(names, atom) for atom in jaxpr.outvars])


def _read(names: dict[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _source(known: dict[Any, Source], atom: Any) -> Source:
    return Source.NEITHER if isinstance(atom, Literal) else known.get(atom, Source.NEITHER)


def _union(given: list[Source]) -> Source:
    made = Source.NEITHER
    for source in given:
        made |= source
    return made


def _only_params(source: Source) -> bool:
    return source == Source.PARAMS
