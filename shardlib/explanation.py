"""What a plan decided about a model, as a plain value: text, JSON, totals. Rich rendering lives in `report`.

In: entries with reasons. Out: `Explanation`, printable anywhere.

    print(bound.explain())
"""

import html
import math
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshes.shape import MeshShape
from shardlib.cost.promises import PromisedCollective
from shardlib.optimizer_specs import StateEntry
from shardlib.plan import STAGE
from shardlib.spec_axes import axes_of, is_spec
from shardlib.specs import Entry, itemsize
from shardlib.staging_facts import SEVERAL, Balance, StageFacts, StagingFacts
from shardlib.streamed_inputs import Input


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
        pipeline: how the layers are staged; None without a stage axis.
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
    pipeline: StagingFacts | None = None

    @property
    def num_parameters(self) -> int:
        """Number of scalar parameters of the whole model, whatever the mesh: padding is not counted."""
        padding = 0 if self.pipeline is None else self.pipeline.padded_parameters
        return sum(math.prod(entry.shape) for entry in self.parameters) - padding

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
            "pipeline": None if self.pipeline is None else self.pipeline.to_json(),
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
        if self.pipeline is not None:
            lines.append("pipeline:")
            lines += [f"  {name}: {value}" for name, value in pipeline_rows(self.pipeline)]
            lines += [f"  {stage_text(rank, stage)}" for rank, stage in enumerate(self.pipeline.stages)]
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


def pipeline_rows(facts: StagingFacts) -> list[tuple[str, str]]:
    """What was cut, what travels and who waits how long: a name and a sentence each."""
    kinds, (below, shown) = len(facts.layer_parameters), _listed(facts.layer_parameters)
    rows = [
        ("cut at", facts.where),
        ("layers", f"{facts.num_layers}, with {kinds} parameters each{below}: {shown}"),
        (
            "other parameters",
            f"{facts.other_parameters:,} scalars, stored in parts over the stages; {_others_text(facts)}",
        ),
        ("message", f"{' + '.join(facts.message)}, {bytes_text(facts.message_bytes)} per microbatch"),
        ("side inputs", side_text(facts)),
        ("work", work_text(facts)),
        ("balance", balance_text(facts)),
        ("memory", memory_text(facts)),
        ("ticks", ticks_text(facts)),
        (
            "messages",
            f"{facts.num_permutes} permutes in one step, {bytes_text(facts.message_bytes_per_device)} sent by the "
            "busiest device",
        ),
        ("inputs", "; ".join(map(input_text, facts.inputs)) or "none"),
    ]
    if facts.padded_rows:
        padding = (
            f"{facts.padded_rows} of {facts.num_rows} stored rows of every layer parameter stand for no layer; they "
            "stay zero and do not count as parameters"
        )
        rows.append(("padding", padding))
    return rows


def _listed(paths: Sequence[str]) -> tuple[str, str]:
    """What paths have in common, in words, and the first few of them without it."""
    own = any(SEVERAL in path for path in paths)  # layers with parameters of their own share no folder
    folder = "" if own or not paths else posixpath.commonpath([posixpath.dirname(path) for path in paths])
    start = f"{folder}/" if folder else ""
    shown = ", ".join(path.removeprefix(start) for path in paths[:6]) + (", ..." if len(paths) > 6 else "")
    return (f" under {start}" if start else ""), shown


def memory_text(facts: StagingFacts) -> str:
    """`room for 7 microbatches that wait for their backward pass: the input of every layer of each, 448.0 KiB ...`."""
    text = f"room for {facts.ring_slots} microbatches that wait for their backward pass"
    if facts.ring_bytes is None:
        return f"{text}: what residuals={facts.residuals} stores of each"
    kept = "the stage's input" if facts.residuals == STAGE else "the input of every layer"
    return f"{text}: {kept} of each, {bytes_text(facts.ring_bytes)} on every device"


def ticks_text(facts: StagingFacts) -> str:
    """`14; stages are idle 31.8% of a step`."""
    text = f"{facts.num_ticks}; stages are idle {facts.bubble_fraction:.1%} of a step"
    if math.isclose(facts.bubble_fraction, facts.free_bubble_fraction, abs_tol=5e-4):
        return text
    return f"{text}, where {facts.free_bubble_fraction:.1%} would be if none waited for another's tick to end"


def side_text(facts: StagingFacts) -> str:
    """`bool[1, 8, 8] read by every layer; every stage makes them again, without matrix products`."""
    kinds = []
    if facts.shared_inputs:
        kinds.append(f"{' + '.join(facts.shared_inputs)} read by every layer")
    if facts.sliced_inputs:
        kinds.append(f"{' + '.join(facts.sliced_inputs)} with a slice per layer")
    if not kinds:
        return "none"
    cost = f"with matrix products of {facts.side_flops:,} FLOPs" if facts.side_flops else "without matrix products"
    return f"{', '.join(kinds)}; every stage makes them again, {cost}"


def _others_text(facts: StagingFacts) -> str:
    if not facts.spread_parameters:
        return "every stage gathers them once per step"
    return (
        f"{facts.spread_parameters:,} of them stay there, and all stages compute embedding and head together; every "
        "stage gathers the others once per step"
    )


def input_text(one: Input) -> str:
    """`frames streamed, 3.0 KiB of 8.0 KiB on every device: a stage holds 2 of 8 microbatches; ...`."""
    if not one.streamed:
        return f"{one.path} whole on every stage, {bytes_text(one.whole_bytes)}: {one.reason}"
    held = f"{bytes_text(one.held_bytes)} of {bytes_text(one.whole_bytes)} on every device"
    return f"{one.path} streamed, {held}: {one.reason}"


def work_text(facts: StagingFacts) -> str:
    """`a layer is 50.3 MFLOP forward per microbatch; before the layers 0.0 layers, after them 0.2`."""
    if not facts.layer_flops:
        return "the layers have no matrix products: they count alike, and nothing else counts"
    return (
        f"a layer is {flops_text(facts.layer_flops)} of matrix products forward per microbatch; what comes before "
        f"the layers costs {facts.embedding:.2f} layers, what comes after them {facts.head:.2f}"
    )


def balance_text(facts: StagingFacts) -> str:
    """`even: largest load 1.19 of the mean; balance=cost makes it 1.05, with 3, 3, 3, 1 layers per stage`."""
    chunks = len(facts.stages) * facts.num_chunks
    uneven = facts.balance == "even" and facts.num_layers % chunks
    kind = f"by cost, as {facts.num_layers} layers do not divide over {chunks} stages" if uneven else facts.balance
    text = f"{kind}: largest load {facts.chosen.max_over_mean:.2f} of the mean"
    if facts.by_cost == facts.chosen:
        return f"{text}, the least there can be"
    return f"{text}; balance=cost makes it {_balance_of(facts.by_cost)}"


def _balance_of(balance: Balance) -> str:
    return f"{balance.max_over_mean:.2f}, with {', '.join(map(str, balance.layers))} layers per stage"


def layers_text(stage: StageFacts) -> str:
    """`0-2, 12-14`: a rank's layers, chunk by chunk."""
    return ", ".join(f"{start}" if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in stage.layers)


def stage_text(rank: int, stage: StageFacts) -> str:
    """`stage 0: layers 0-2, load 3.00 layers, 594,432 parameters of layers, live microbatches 7`."""
    return (
        f"stage {rank}: layers {layers_text(stage)}, load {stage.load:.2f} layers, {stage.layer_parameters:,} "
        f"parameters of layers, live microbatches {stage.live_microbatches}"
    )


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


def flops_text(flops: float) -> str:
    """`1.5 GFLOP`, in units of 1000."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if flops < 1000:
            return f"{flops:.0f} FLOP" if unit == "FLOP" else f"{flops:.1f} {unit}"
        flops /= 1000
    return f"{flops:,.1f} TFLOP"
