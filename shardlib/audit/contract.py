"""Holds a compiled train step to what its mesh axes promised: bytes per axis and kind, found against promised.

In: a parsed program, promises in bytes, the mesh. Out: a `Contract`, a table with its problems.

    contract = hold(parse(trainer.compiled.as_text()), bound.promised(), bound.plan.mesh)
    print(contract)
"""

from collections.abc import Iterable
from dataclasses import dataclass

from meshes.shape import MeshShape
from shardlib.audit.program import Collective, Program, axes_of
from shardlib.cost.promises import PromisedCollective

OPTIMIZER_SCOPE = "/optimizer/"
REDUCTIONS = ("all-reduce", "reduce-scatter")
_Key = tuple[tuple[str, ...], str, bool | None, bool]
"""Axes, kind, in a loop, under a branch there that is not taken in every turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of collective over the same mesh axes: what was promised, what is there; a static leaf.

    Args:
        axes: mesh axes it runs over together.
        kind: XLA's name.
        loop: inside a loop or not; None where the compiler chooses, and both are added up.
        exact: promised and found must agree.
        what: arrays promised.
        promised_arrays, promised_bytes: executions, and bytes each device sends in one step.
        form_bytes: of this kind, once the backend has given the promises the form it is known for.
        found_arrays, found_bytes: the same in the program; None when a loop runs an unknown number of times. What is
            under a branch counts as often as its promise says that the branch is taken.
        scalar_bytes: found for scalars (norms, counts), which no axis promises.
        unread_bytes: of the promise, what a compiler may leave out because nothing reads it.
        widened: the backend moves 32 bits for each promised element of 16.
        largest: the collective found that sends most, with its operation and source line; empty when there is none.
    """

    axes: tuple[str, ...]
    kind: str
    loop: bool | None
    exact: bool
    what: tuple[str, ...]
    promised_arrays: int
    promised_bytes: float
    form_bytes: float
    found_arrays: int | None
    found_bytes: float | None
    scalar_bytes: float
    unread_bytes: float
    widened: bool
    largest: str

    @property
    def axis(self) -> str:
        """The axes as text: `data+fsdp`."""
        return "+".join(self.axes)

    @property
    def excess_bytes(self) -> float | None:
        """Found beyond the promise; negative for what is missing, None when unknown."""
        if self.found_bytes is None:
            return None
        return self.found_bytes - self.promised_bytes * (2 if self.widened else 1)

    @property
    def where(self) -> str:
        """`all-reduce over data, in a loop`."""
        return f"{self.kind} over {self.axis}{', in a loop' if self.loop else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A program beside the promises of its plan; a static leaf.

    Args:
        mesh: the mesh.
        rows: every axis and kind that was promised or found.
        optimizer: sums that the optimizer makes itself (Adafactor's means over a split dim): no axis promises them.
        unattributed: collectives that run along no mesh axis, one line each.
        problems: broken promises, one line each; empty when the program keeps them.
    """

    mesh: MeshShape
    rows: tuple[Row, ...]
    optimizer: tuple[Row, ...]
    unattributed: tuple[str, ...]
    problems: tuple[str, ...]

    def of(self, *axes: str) -> tuple[Row, ...]:
        """Rows over just these axes."""
        return tuple(row for row in self.rows if set(row.axes) == set(axes))

    @property
    def excess_bytes(self) -> float:
        """Found beyond all promises, rows that fall short counted as zero."""
        return sum(max(row.excess_bytes or 0.0, 0.0) for row in self.rows)

    def __str__(self) -> str:
        heading = ("axis", "kind", "of", "promised", "known form", "found", "excess")
        lines = [heading, *(_cells(row) for row in self.rows), *(_cells(row, "optimizer") for row in self.optimizer)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
        text = [f"mesh {self.mesh}: bytes each device sends in one step"]
        for line in lines:
            left = [cell.ljust(width) for cell, width in zip(line[:3], widths[:3], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(line[3:], widths[3:], strict=True)]
            text.append("  ".join([*left, *right]).rstrip())
        text += [f"not promised: {row.largest}" for row in self.rows if row.largest and not row.what]
        text += [f"unattributed: {line}" for line in self.unattributed]
        text += [f"problem: {line}" for line in self.problems] or ["every promise is kept"]
        return "\n".join(text)


def hold(program: Program, promises: Iterable[PromisedCollective], mesh_shape: MeshShape) -> Contract:
    """Compares what a program moves with what was promised, per set of mesh axes and kind.

    Exact promises (data-like axes under the explicit lowering, stages) must be met to the byte, in or outside of a
    loop as promised; a backend that widens 16-bit elements is allowed for. A program does not say how often a branch
    is taken: what is promised under one must be under one, and is held as if it were taken in every turn. What the
    compiler manages must together stay below the backend's known form of the promises, for the compiler moves bytes
    from one axis to another, and the excess of each axis over its promises is reported. Sums of scalars and the
    optimizer's own sums are shown and not held.

    Args:
        program: of a whole train step, compiled on that mesh.
        promises: `Bound.promised()`.
        mesh_shape: the mesh.
    """
    promises = tuple(promises)
    exact_axes = {axis for promise in promises if promise.exact for axis in promise.axes}
    by_key: dict[_Key, list[PromisedCollective]] = {}
    for promise in promises:
        loop, branch = (promise.loop, promise.taken < 1) if promise.exact else (None, False)
        by_key.setdefault((promise.axes, promise.kind, loop, branch), []).append(promise)
    found: dict[_Key, list[Collective]] = {}
    optimizer: dict[_Key, list[Collective]] = {}
    unattributed: list[str] = []
    for collective in program.collectives:
        match = axes_of(collective, mesh_shape)
        if match.axes is None:
            unattributed.append(f"{_described(collective)}: {match.reason}")
        elif match.axes:
            is_exact = set(match.axes) <= exact_axes
            own = collective.kind == "all-reduce" and OPTIMIZER_SCOPE in (collective.op_name or "")
            key = (match.axes, collective.kind, collective.loop_depth > 0 if is_exact else None, False)
            branched = (*key[:3], True)
            key = branched if collective.in_branch and branched in by_key else key
            (optimizer if own else found).setdefault(key, []).append(collective)
    order = {axis: index for index, axis in enumerate(mesh_shape.names)}
    keys = sorted({*by_key, *found}, key=lambda key: ([order[axis] for axis in key[0]], key[1], bool(key[2]), key[3]))
    rows = tuple(_row(key, by_key.get(key, []), found.get(key, []), exact_axes, promises) for key in keys)
    return Contract(
        mesh=mesh_shape,
        rows=rows,
        optimizer=tuple(_row(key, [], ours, set(), ()) for key, ours in optimizer.items()),
        unattributed=tuple(unattributed),
        problems=(*_broken(rows), *_beyond(rows, promises), *(f"unattributed: {line}" for line in unattributed)),
    )


def _row(
    key: _Key,
    promises: list[PromisedCollective],
    found: list[Collective],
    exact_axes: set[str],
    everything: tuple[PromisedCollective, ...],
) -> Row:
    axes, kind, loop, branch = key
    is_exact = set(axes) <= exact_axes
    is_known = all(one.times_executed is not None for one in found)
    of_bytes, of_arrays = _taken(promises if branch else [] if is_exact else everything, exact=is_exact)
    times = [((one.times_executed or 0) * (of_bytes if one.in_branch else 1), one) for one in found]
    found_bytes = sum((count * one.bytes_per_device for count, one in times), 0.0) if is_known else None
    scalars = sum(count * one.bytes_per_device * _share_of_scalars(one) for count, one in times)
    arrays = [(one.times_executed or 0) * len(one.operands) * (of_arrays if one.in_branch else 1) for one in found]
    promised_bytes = sum(promise.bytes_per_device for promise in promises)
    widened_bytes = sum(promise.widened_bytes for promise in promises)
    # Reductions are widened, and packed sums are 32 bits wide already: only equality to the byte tells.
    unread = sum(promise.unread_bytes for promise in promises)
    least = max(promised_bytes + 0.5, widened_bytes - 2 * unread) if unread else widened_bytes
    widened = bool(is_exact and widened_bytes != promised_bytes and least <= (found_bytes or 0.0) <= widened_bytes)
    return Row(
        axes=axes,
        kind=kind,
        loop=loop,
        exact=is_exact,
        what=tuple(dict.fromkeys(promise.what for promise in promises)),
        promised_arrays=sum(promise.count for promise in promises),
        promised_bytes=widened_bytes / 2 if widened else promised_bytes,
        form_bytes=sum(
            one.form_bytes for one in everything if (one.axes, one.form_kind, is_exact) == (axes, kind, one.exact)
        ),
        found_arrays=round(sum(arrays)) if is_known else None,
        found_bytes=found_bytes,
        scalar_bytes=scalars,
        unread_bytes=unread,
        widened=widened,
        largest=_described(max(found, key=lambda one: one.bytes_per_device)) if found else "",
    )


def _taken(promises: Iterable[PromisedCollective], *, exact: bool) -> tuple[float, float]:
    """The share of turns in which branches are taken, over the bytes and over the arrays of some promises."""
    promises = [promise for promise in promises if promise.exact == exact and promise.count]
    if not promises:
        return 1.0, 1.0
    sent = sum(promise.bytes_per_device / promise.taken for promise in promises)
    count = sum(promise.count / promise.taken for promise in promises)
    return sum(promise.bytes_per_device for promise in promises) / sent, sum(p.count for p in promises) / count


def _share_of_scalars(collective: Collective) -> float:
    """Of its bytes; a backend merges scalars with arrays."""
    scalars = sum(shape.num_bytes for shape in collective.operands if not shape.dims)
    return scalars / max(sum(shape.num_bytes for shape in collective.operands), 1)


def _broken(rows: tuple[Row, ...]) -> list[str]:
    problems = []
    for row in rows:
        if row.excess_bytes is None:
            problems.append(f"{row.where}: a loop around it runs an unknown number of times")
        elif row.exact and row.excess_bytes < -row.unread_bytes * (2 if row.widened else 1) - 0.5:
            problems.append(f"{row.where}: {-row.excess_bytes:,.0f} of {row.promised_bytes:,.0f} bytes are missing")
        elif row.exact and row.excess_bytes > row.scalar_bytes + 0.5:
            promised = f"{row.promised_bytes:,.0f} bytes" if row.promised_bytes else "nothing"
            problems.append(f"{row.where}: {row.excess_bytes:,.0f} bytes beyond the {promised} promised")
    return problems


def _beyond(rows: tuple[Row, ...], promises: tuple[PromisedCollective, ...]) -> list[str]:
    """What the compiler manages: more than the known form of all its promises, or an axis without any reduction."""
    managed = [row for row in rows if not row.exact]
    known = sum(_widest(promise) for promise in promises if not promise.exact)
    found = sum(max((row.found_bytes or 0.0) - row.scalar_bytes, 0.0) for row in managed)
    problems = []
    if found > known + 0.5:
        over = ", ".join(dict.fromkeys(row.axis for row in managed))
        problems.append(f"{over}: {found:,.0f} bytes, and the known form of their promises has {known:,.0f}")
    reduced = {axis for row in managed if row.kind in REDUCTIONS and row.found_bytes != 0 for axis in row.axes}
    wanted = {axis for one in promises if not one.exact and one.kind in REDUCTIONS for axis in one.axes}
    return problems + [f"{axis}: reductions were promised, and there is none" for axis in sorted(wanted - reduced)]


def _widest(promise: PromisedCollective) -> float:
    """Bytes of its known form, by a backend that widens 16-bit elements."""
    sent = promise.bytes_per_device
    return promise.form_bytes * (promise.widened_bytes / sent if sent else 1)


def _described(collective: Collective) -> str:
    """`all-gather to f32[16,16] at jit(step)/dot_general, model.py:12`."""
    shapes = ", ".join(map(str, collective.results[:3])) + (", ..." if len(collective.results) > 3 else "")
    at = f" at {collective.op_name}" if collective.op_name else ""
    line = ", {}:{}".format(*collective.source[0]) if collective.source else ""
    return f"{collective.kind} to {shapes}{at}{line}"


def _cells(row: Row, what: str = "") -> tuple[str, ...]:
    found = "unknown" if row.found_bytes is None else f"{row.found_bytes:,.0f}"
    excess = "" if not row.excess_bytes else f"{row.excess_bytes:+,.0f}"
    promised = f"{row.promised_bytes:,.0f}{' x 2' if row.widened else ''}"
    kind, form = f"{row.kind}{' (loop)' if row.loop else ''}", "exact" if row.exact else f"{row.form_bytes:,.0f}"
    return (row.axis, kind, what or ", ".join(row.what), promised, form, found, excess)
