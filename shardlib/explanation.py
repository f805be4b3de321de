"""What a plan decided about a model, as a plain value: text, JSON, totals. Rich rendering lives in `report`.

In: entries with reasons. Out: `Explanation`, printable anywhere.

    print(bound.explain())
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshes.shape import MeshShape
from shardlib.cost.promises import PromisedCollective
from shardlib.optimizer_specs import StateEntry
from shardlib.spec_axes import axes_of, is_spec
from shardlib.specs import Entry, itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes of a group of arrays: of whole arrays, and of the shards one device holds."""

    total: int
    per_device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Every decision of a plan about a model; a static value.

    Args:
        mesh: the mesh.
        parameters, batch, activations: arrays with spec and reason per dim.
        gradient_bytes: size of the reduced gradients.
        optimizer: the optimizer's state, each array with the reason for its spec.
        choices: what the plan decided where it had a choice.
        promises: what one train step will move between devices.
        notices: what is legal and still worth saying.
    """

    mesh: MeshShape
    parameters: tuple[Entry, ...]
    batch: tuple[Entry, ...]
    activations: tuple[Entry, ...]
    gradient_bytes: Bytes
    optimizer: tuple[StateEntry, ...]
    choices: tuple[str, ...]
    promises: tuple[PromisedCollective, ...]
    notices: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """Number of scalar parameters of the whole model."""
        return sum(math.prod(entry.shape) for entry in self.parameters)

    @property
    def totals(self) -> dict[str, Bytes]:
        """Bytes of parameters, gradients and optimizer state, and their sum."""
        groups = {
            "parameters": entries_bytes(self.parameters),
            "gradients": self.gradient_bytes,
            "optimizer_state": entries_bytes(self.optimizer),
        }
        whole = Bytes(
            total=sum(group.total for group in groups.values()),
            per_device=sum(group.per_device for group in groups.values()),
        )
        return {**groups, "all": whole}

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain JSON values."""
        return {
            "mesh": str(self.mesh),
            "devices": self.mesh.num_devices,
            "num_parameters": self.num_parameters,
            "totals": {
                name: {"total_bytes": size.total, "bytes_per_device": size.per_device}
                for name, size in self.totals.items()
            },
            "parameters": [entry_json(entry) for entry in self.parameters],
            "batch": [entry_json(entry) for entry in self.batch],
            "activations": [entry_json(entry) for entry in self.activations],
            "optimizer": [{**entry_json(entry), "reason": entry.reason} for entry in self.optimizer],
            "choices": list(self.choices),
            "promises": [promise_json(promise) for promise in self.promises],
            "notices": list(self.notices),
        }

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [f"mesh {self.mesh} ({self.mesh.num_devices} devices), {self.num_parameters:,} parameters"]
        for heading, entries in (
            ("parameters", self.parameters),
            ("batch", self.batch),
            ("activations", self.activations),
        ):
            lines.append(f"{heading}:")
            for entry in entries:
                lines.append(
                    f"  {entry.path} {entry.dtype}{list(entry.shape)} {spec_text(entry)}, "
                    f"{bytes_text(entry.bytes_per_device)} per device"
                )
                lines += [f"    {line}" for line in reason_lines(entry)]
        lines.append("bytes per device:")
        lines += [
            f"  {name}: {bytes_text(size.per_device)} of {bytes_text(size.total)}" for name, size in self.totals.items()
        ]
        if self.promises:
            lines.append("moved in one step:")
            lines += [f"  {promise_text(promise)}" for promise in self.promises]
        lines += [*self.choices, *(f"notice: {notice}" for notice in self.notices)]
        return "\n".join(lines)


def entries_bytes(entries: Sequence[Entry]) -> Bytes:
    """Sizes summed over entries."""
    return Bytes(
        total=sum(entry.size_bytes for entry in entries),
        per_device=sum(entry.bytes_per_device for entry in entries),
    )


def tree_bytes(tree: Any, specs: Any, mesh: MeshShape) -> Bytes:
    """Sizes of a tree of abstract arrays under a tree of specs."""
    total = per_device = 0
    flat_specs = jax.tree.leaves(specs, is_leaf=is_spec)
    for leaf, spec in zip(jax.tree.leaves(tree), flat_specs, strict=True):
        size = math.prod(leaf.shape) * itemsize(str(leaf.dtype))
        shards = math.prod(mesh.size(axis) for entry in spec for axis in axes_of(entry))
        total, per_device = total + size, per_device + size // shards
    return Bytes(total=total, per_device=per_device)


def entry_json(entry: Entry) -> dict[str, Any]:
    """One array as plain JSON values."""
    return {
        "path": entry.path,
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "logical_axes": list(entry.names),
        "spec": [list(decision.mesh_axes) for decision in entry.decisions],
        "bytes_per_device": entry.bytes_per_device,
        "reasons": [decision.reason for decision in entry.decisions],
    }


def promise_json(promise: PromisedCollective) -> dict[str, Any]:
    """One promised collective as plain JSON values."""
    return {
        "kind": promise.kind,
        "mesh_axes": list(promise.axes),
        "what": promise.what,
        "count": promise.count,
        "bytes_per_device": round(promise.bytes_per_device),
        "per_microbatch": promise.loop,
        "exact": promise.exact,
    }


def promise_text(promise: PromisedCollective) -> str:
    """`fsdp: 17 x all-gather of split parameters, 82.3 KiB per device`."""
    often = f"{promise.count:,} x " if promise.count > 1 else ""
    about = "" if promise.exact else "about "
    where = ", in the loop over microbatches" if promise.loop else ""
    size = bytes_text(promise.bytes_per_device)
    return f"{promise.axis}: {often}{promise.kind} of {promise.what}, {about}{size} per device{where}"


def spec_text(entry: Entry) -> str:
    """`(fsdp, tensor, -)`: mesh axes per dim."""
    return "(" + ", ".join("+".join(decision.mesh_axes) or "-" for decision in entry.decisions) + ")"


def reason_lines(entry: Entry) -> list[str]:
    """`embed=64: fsdp, by rule ...`, one line per dim."""
    return [
        f"{decision.name or 'unnamed'}={decision.size}: {'+'.join(decision.mesh_axes) or 'whole'}, {decision.reason}"
        for decision in entry.decisions
    ]


def bytes_text(size: float) -> str:
    """`1.5 MiB`, in units of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
