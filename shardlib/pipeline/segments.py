"""Layers between `layer_boundary` markers: equal programs over different parameters, as a loop.

In: a program with markers. Out: a `Stack` whose body is the first layer's program, or an error that says which layer
differs and where.

    stack = segments_of(program, paths)    # None for a program without markers
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from meshes.errors import ShardingError
from shardlib.annotate import BOUNDARY
from shardlib.jax_compat import source_line
from shardlib.layer_scan import equations_within, without_checkpoints
from shardlib.pipeline.stack import Chain, Given, Stack, Stacked
from shardlib.programs import Program, reflatten

ADVICE = "call x = layer_boundary(x) before the first layer and after every layer"


def segments_of(program: Program, paths: list[str]) -> Stack | None:
    """The layers between markers as a `Stack`; None where there is no marker."""
    groups = _markers(program.equations)
    if not groups:
        return None
    _check_markers(program, groups)
    # Calls inside the layers are opened: what they fold into keys differs from layer to layer.
    layers = program.equations[groups[0][0] : groups[-1][-1]]
    inside = {id(e) for e in layers} | {id(e) for e in equations_within(Equations(layers))}
    program = reflatten(program, lambda call: id(call) in inside)
    groups = _markers(program.equations)
    bounds = [(groups[k][-1] + 1, groups[k + 1][0]) for k in range(len(groups) - 1)]
    before, inside = _hoisted(program, bounds, first=groups[0][0], num_params=len(paths))
    leaf_of = {var: position for position, var in enumerate(program.inputs[: len(paths)])}
    carries = [[program.equations[i].outvars[0] for i in group] for group in groups]
    layers = [
        _canonical(inside[k], carries[k], [program.equations[i].invars[0] for i in groups[k + 1]], leaf_of)
        for k in range(len(inside))
    ]
    _check_flow(layers, program, groups, carries)  # first: a value without a marker makes layers differ, too
    for k, layer in enumerate(layers[1:], start=1):
        _check_same(layers[0], layer, k)
    after = program.equations[groups[-1][-1] + 1 :]
    return _stack(program, layers, before, after, first=program.equations[groups[0][0]], groups=groups)


@dataclass(frozen=True, slots=True)
class Equations:
    """Equations where a jaxpr is expected."""

    eqns: tuple[Any, ...]


def _markers(equations: tuple[Any, ...]) -> list[list[int]]:
    """Positions of the markers, those of one call together."""
    groups: list[list[int]] = []
    for index, equation in enumerate(equations):
        if equation.primitive.name == "name" and equation.params["name"] == BOUNDARY:
            if groups and groups[-1][-1] == index - 1:
                groups[-1].append(index)
            else:
                groups.append([index])
    return groups


def _check_markers(program: Program, groups: list[list[int]]) -> None:
    at = lambda group: source_line(program.equations[group[0]])  # noqa: E731
    if len(groups) < 2:
        raise ShardingError(f"there is one layer_boundary ({at(groups[0])}), and layers lie between two", fix=ADVICE)
    kinds = [[program.equations[i].outvars[0].aval.str_short() for i in group] for group in groups]
    for k, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ShardingError(
                f"layer_boundary {k} marks {', '.join(kind)} ({at(groups[k])}), the first one "
                f"{', '.join(kinds[0])}: stages pass on one kind of value",
                fix="mark arrays of the same shapes and dtypes at every boundary",
            )


def _hoisted(
    program: Program, bounds: list[tuple[int, int]], *, first: int, num_params: int
) -> tuple[list[Any], list[list[Any]]]:
    """Equations before the layers, with those moved there that read neither activations nor parameters; and the rest.

    Layers differ in what they fold into keys, and repeat masks that are the same for all: equal ones are merged.
    """
    before = list(program.equations[:first])
    tainted = set(program.inputs[:num_params])
    for equation in before:
        if any(not isinstance(atom, Literal) and atom in tainted for atom in equation.invars):
            tainted |= set(equation.outvars)
    free = (set(program.inputs) | {v for e in before for v in e.outvars} | set(program.constants)) - tainted
    names: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    inside: list[list[Any]] = []
    for start, stop in bounds:
        kept = []
        for equation in program.equations[start:stop]:
            equation = equation.replace(invars=[_read(names, atom) for atom in equation.invars])
            if not all(isinstance(atom, Literal) or atom in free for atom in equation.invars):
                kept.append(equation)
                continue
            free |= set(equation.outvars)
            key = (_signature(equation), tuple(_identity(atom) for atom in equation.invars))
            if key in known:
                names.update(zip(equation.outvars, known[key].outvars, strict=True))
            else:
                known[key] = equation
                before.append(equation)
        inside.append(kept)
    return before, inside


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's equations under positions instead of names.

    Args:
        equations: as traced.
        text: one line per equation: what it is and where its inputs come from.
        carry, final: variables of the carry before and after.
        params, outside: what it reads of parameters and of other values, in order of first use.
        made: variables it defines, in order.
    """

    equations: list[Any]
    text: list[Any]
    carry: list[Any]
    final: list[Any]
    params: list[Any]
    outside: list[Any]
    made: list[Any]


def _canonical(equations: list[Any], carry: list[Any], final: list[Any], leaf_of: dict[Any, int]) -> _Layer:
    places: dict[Any, Any] = {var: ("carry", i) for i, var in enumerate(carry)}
    params, outside, made, text = [], [], [], []

    def place(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return ("literal", repr(atom.val), str(atom.aval))
        if atom not in places:
            kind, found = ("parameter", params) if atom in leaf_of else ("outside", outside)
            places[atom] = (kind, len(found), atom.aval.str_short())
            found.append(atom)
        return places[atom]

    for equation in equations:
        text.append((_signature(equation), tuple(place(atom) for atom in equation.invars)))
        for var in equation.outvars:
            places[var] = ("made", len(made))
            made.append(var)
    text.append(("the carry", tuple(place(atom) for atom in final)))
    return _Layer(equations=equations, text=text, carry=carry, final=final, params=params, outside=outside, made=made)


def _signature(equation: Any) -> tuple[Any, ...]:
    """What an equation does, comparable: callables among its parameters (rules of derivatives) are left out."""
    shown = []
    for name, value in sorted(equation.params.items()):
        if isinstance(value, Jaxpr | ClosedJaxpr) or not callable(value):
            shown.append((name, str(value)))
    return (equation.primitive.name, *shown, *(var.aval.str_short() for var in equation.outvars))


def _identity(atom: Any) -> Any:
    return ("literal", repr(atom.val), str(atom.aval)) if isinstance(atom, Literal) else id(atom)


def _read(names: dict[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _check_same(first: _Layer, other: _Layer, k: int) -> None:
    for index, (one, two) in enumerate(zip(first.text, other.text)):
        if one != two:
            at = source_line(other.equations[min(index, len(other.equations) - 1)]) if other.equations else ""
            raise ShardingError(
                f"layer {k} is not the program of layer 0: at {at or 'its end'} layer 0 {_does(first, index)} and "
                f"layer {k} {_does(other, index)}",
                fix="a pipeline runs one program on every stage: make the layers equal (a difference can be a "
                "parameter), or leave the odd ones before the first or after the last marker",
            )


def _does(layer: _Layer, index: int) -> str:
    """What a layer does at a position of its program, for an error."""
    if index >= len(layer.equations):
        return f"ends with {', '.join(var.aval.str_short() for var in layer.final)}"
    equation = layer.equations[index]
    return f"has {equation.primitive.name}({', '.join(atom.aval.str_short() for atom in equation.invars)})"


def _check_flow(layers: list[_Layer], program: Program, groups: list[list[int]], carries: list[list[Any]]) -> None:
    """Raises for values that pass from layer to layer, or leave, without a marker."""
    made_in = {var: k for k, layer in enumerate(layers) for var in layer.made}
    between = {var: k for k, carry in enumerate(carries[:-1]) for var in carry}
    for k, layer in enumerate(layers):
        for var in layer.outside:
            source = made_in.get(var, between.get(var))
            if source is not None:
                raise ShardingError(
                    f"layer {k} reads {var.aval.str_short()}, which layer {source} made and no marker carries",
                    fix="mark everything that passes on in one call: x, aux = layer_boundary((x, aux))",
                )
    for equation in program.equations[groups[-1][-1] + 1 :]:
        for atom in equation.invars:
            if not isinstance(atom, Literal) and atom in between:
                raise ShardingError(
                    f"the activations before layer {between[atom]} are read after the layers ({source_line(equation)})",
                    fix="return them from the layer as a value of its own, not through the marker",
                )


def _stack(
    program: Program, layers: list[_Layer], before: list[Any], after: Iterable[Any], *, first: Any, groups: Any
) -> Stack:
    after = tuple(after)
    leaf_of = {var: position for position, var in enumerate(program.inputs)}
    body = layers[0]
    consts, sliced, const_inputs, sliced_inputs = [], [], [], []
    for position, var in enumerate(body.params):
        leaves = tuple(leaf_of[layer.params[position]] for layer in layers)
        if len(set(leaves)) == 1 and len(layers) > 1:
            consts.append(var)
            const_inputs.append(var)
            continue
        if len(set(leaves)) != len(leaves):
            raise ShardingError(
                "some layers share a parameter and others do not, so it belongs to no single stage",
                fix="share it between all layers or none",
            )
        sliced.append(Chain(stacked=(Stacked(leaves=leaves, dim=None),), run=lambda layer: layer))
        sliced_inputs.append(var)
    for position, var in enumerate(body.outside):
        values = tuple(layer.outside[position] for layer in layers)
        if len(set(values)) == 1:
            consts.append(var)
            const_inputs.append(var)
        else:
            sliced.append(Given(variables=values))
            sliced_inputs.append(var)
    read_after = {atom for e in after for atom in e.invars if not isinstance(atom, Literal)}
    read_after |= {atom for atom in program.outputs if not isinstance(atom, Literal)}
    used = [i for i in range(len(body.made)) if any(layer.made[i] in read_after for layer in layers)]
    inputs = (*const_inputs, *body.carry, *sliced_inputs)
    outputs = (*body.final, *(body.made[i] for i in used))
    # One policy decides what a stage stores, so the model's own checkpoints go.
    jaxpr = program.like.replace(constvars=[], invars=list(inputs), outvars=list(outputs), eqns=body.equations)
    jaxpr = without_checkpoints(jaxpr)
    return Stack(
        num_layers=len(layers),
        before=tuple(before),
        after=after,
        consts=tuple(consts),
        initial=tuple(program.equations[i].invars[0] for i in groups[0]),
        sliced=tuple(sliced),
        body=Program(
            like=program.like,
            equations=tuple(jaxpr.eqns),
            inputs=inputs,
            outputs=tuple(jaxpr.outvars),
            constants=program.constants,
        ),
        final=tuple(program.equations[i].outvars[0] for i in groups[-1]),
        outputs=tuple(Given(variables=tuple(layer.made[i] for layer in layers)) for i in used),
        where=f"{len(layers)} layers between markers ({source_line(first)})",
    )
