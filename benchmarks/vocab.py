"""Memory and traffic of a loss over a split vocabulary, beside logits that exist whole; counted, not timed.

In: nothing; emulated CPU devices. Each row is one loss with its gradients by x and the head, compiled for a mesh: bytes
of temporaries on one device, and bytes it sends by kind. Exit status 1 when the split loss does not send its formula
over the tensor axis, or needs more than its share of the memory of gathered logits.

    python -m benchmarks.vocab [--batch 8] [--length 256] [--json FILE] [--plot FILE]
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

from benchmarks.pictures import new_figure
from benchmarks.step_overhead import print_table
from meshes import MeshShape, make_mesh
from shardlib.audit.hlo import parse
from shardlib.audit.memory import read_memory
from shardlib.audit.program import axes_of, totals
from shardlib.cost.collectives import ring_bytes
from shardlib.ops.vocab_loss import token_losses

MESHES: Final = ("tensor=8", "data=2,tensor=4", "fsdp=2,tensor=4")
MAX_TEMP_RATIO: Final = 0.5
"""Temporaries of the split loss over those of gathered logits."""
MIB: Final = 2**20
OURS: Final = "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of one measurement; a static value."""

    batch: int = 8
    length: int = 256
    embed: int = 64
    vocab: int = 4096
    num_chunks: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one loss needs, per device; a static value.

    Args:
        value: the loss, to see that all compute the same.
        temp_bytes: of temporaries at their peak.
        sent_bytes: by kind of collective, under ring algorithms, loops multiplied out.
        sent_over_tensor_bytes: of all kinds, over the axis that splits the vocabulary.
    """

    value: float
    temp_bytes: int
    sent_bytes: Mapping[str, float]
    sent_over_tensor_bytes: float


def gathered(x: jax.Array, head: jax.Array, targets: jax.Array, *, mesh: Mesh, case: Case) -> jax.Array:
    """Logits whole on every device of the tensor axis, then the textbook's loss."""
    place = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    batch = _batch_axes(mesh)
    logits = jax.lax.with_sharding_constraint(x @ head, place(batch, None, "tensor"))
    # The barrier keeps the compiler from gathering the head instead, which here is smaller than the logits.
    logits = jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(logits), place(batch))
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target


def partitioned(x: jax.Array, head: jax.Array, targets: jax.Array, *, mesh: Mesh, case: Case) -> jax.Array:
    """Logits split over the tensor axis by the compiler, the target picked by comparison; whole along the length."""
    spec = NamedSharding(mesh, P(_batch_axes(mesh), None, "tensor"))
    logits = jax.lax.with_sharding_constraint(x @ head, spec)
    largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    shifted = logits - largest
    is_target = jax.lax.broadcasted_iota(targets.dtype, (1, 1, case.vocab), 2) == targets[..., None]
    return jnp.log(jnp.exp(shifted).sum(axis=-1)) - jnp.where(is_target, shifted, 0.0).sum(axis=-1)


def split(x: jax.Array, head: jax.Array, targets: jax.Array, *, mesh: Mesh, case: Case) -> jax.Array:
    """The toolkit's: chunked, the logits made twice and never whole."""
    return token_losses(x, head, targets, mesh=mesh, num_chunks=case.num_chunks).loss


VARIANTS: Final[Mapping[str, Callable[..., jax.Array]]] = {
    "gathered": gathered,
    "partitioned": partitioned,
    OURS: split,
}


def measure_once(mesh_text: str, name: str, case: Case) -> Measured:
    """Compiles one loss on one mesh and runs it once."""
    mesh = make_mesh(mesh_text)
    losses = functools.partial(VARIANTS[name], mesh=mesh, case=case)
    specs = P(_batch_axes(mesh)), P("fsdp" if "fsdp" in mesh.shape else None, "tensor")
    x_place, head_place = (NamedSharding(mesh, spec) for spec in specs)

    def function(x: jax.Array, head: jax.Array, targets: jax.Array) -> Any:
        return jax.value_and_grad(lambda x, head: losses(x, head, targets).sum(), argnums=(0, 1))(x, head)

    places = (x_place, head_place, x_place)
    jitted = jax.jit(function, in_shardings=places, out_shardings=(None, (x_place, head_place)))
    arguments = [jax.device_put(array, place) for array, place in zip(_arrays(case), places, strict=True)]
    compiled = jitted.lower(*arguments).compile()
    program, shape = parse(compiled.as_text() or ""), MeshShape.parse(mesh_text)
    over_tensor = tuple(each for each in program.collectives if "tensor" in (axes_of(each, shape).axes or ()))
    sent = {kind: each.bytes_per_device for kind, each in program.totals.items()}
    return Measured(
        value=float(compiled(*arguments)[0]),
        temp_bytes=read_memory(compiled).temp_bytes,
        sent_bytes={kind: count for kind, count in sent.items() if count is not None},
        sent_over_tensor_bytes=totals(over_tensor).bytes_per_device or 0.0,
    )


def measure(meshes: Sequence[str], case: Case) -> dict[str, dict[str, Measured]]:
    """Every variant on every mesh; raises AssertionError when their losses differ."""
    found = {mesh: {name: measure_once(mesh, name, case) for name in VARIANTS} for mesh in meshes}
    for mesh, each in found.items():
        for name, measured in each.items():
            wanted = each[OURS].value
            assert abs(measured.value - wanted) <= 1e-5 * abs(wanted), f"{mesh} {name}: {measured.value}, not {wanted}"
    return found


def promised_bytes(mesh: str, case: Case) -> float:
    """What the split loss sends over the tensor axis: three floats per token forward, the gradient of x backward."""
    sizes = dict(MeshShape.parse(mesh).axes)
    tokens = case.batch * case.length // (sizes.get("data", 1) * sizes.get("fsdp", 1))
    floats = tokens * (1 + 2 + case.embed)
    return ring_bytes("all-reduce", buffer_bytes=4 * floats, group_size=sizes["tensor"])


def missed(found: Mapping[str, Mapping[str, Measured]], case: Case) -> list[str]:
    """One line per promise that is not kept."""
    problems = []
    for mesh, each in found.items():
        sent, promised = each[OURS].sent_over_tensor_bytes, promised_bytes(mesh, case)
        if sent != promised:
            problems.append(f"{mesh}: sends {sent:.0f} bytes over tensor, not {promised:.0f}")
        ratio = each[OURS].temp_bytes / each["gathered"].temp_bytes
        if ratio > MAX_TEMP_RATIO:
            problems.append(f"{mesh}: {ratio:.2f} of the temporaries of gathered logits, above {MAX_TEMP_RATIO}")
    return problems


def table(found: Mapping[str, Mapping[str, Measured]], case: Case) -> Table:
    """Bytes by mesh and variant."""
    kinds = sorted({kind for each in found.values() for measured in each.values() for kind in measured.sent_bytes})
    sizes = (
        f"batch {case.batch}, length {case.length}, embed {case.embed}, vocab {case.vocab}, {case.num_chunks} chunks"
    )
    columns = [*(f"{kind}, MiB" for kind in kinds), "over tensor, MiB"]
    shown = Table("mesh", "loss", "temporaries, MiB", *columns, title=f"Loss and gradients per device: {sizes}")
    for mesh, each in found.items():
        for name, measured in each.items():
            sent = [measured.sent_bytes.get(kind, 0.0) for kind in kinds] + [measured.sent_over_tensor_bytes]
            shown.add_row(mesh, name, *(f"{count / MIB:.3f}" for count in (measured.temp_bytes, *sent)))
    return shown


def plot(found: Mapping[str, Mapping[str, Measured]], case: Case, file: Path) -> None:
    """Temporaries and bytes over the tensor axis, as a picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = new_figure(figsize=(9, 3.5))
    quantities = {"temporaries": "temp_bytes", "sent over tensor": "sent_over_tensor_bytes"}
    for axes, (title, quantity) in zip(figure.subplots(1, 2), quantities.items(), strict=True):
        for number, name in enumerate(VARIANTS):
            sizes = [getattr(each[name], quantity) / MIB for each in found.values()]
            axes.bar([place + 0.27 * number for place in range(len(found))], sizes, width=0.25, label=name)
        axes.set_xticks([place + 0.27 for place in range(len(found))], list(found), fontsize=8)
        axes.set(title=f"{title}, vocabulary {case.vocab:,}", ylabel="MiB per device")
    figure.axes[0].legend()
    figure.savefig(file)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 when a promise is not kept, 3 when a picture cannot be drawn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vocab", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw temporaries and bytes")
    for name, default in asdict(Case()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{default} unless given")
    chosen = vars(parser.parse_args(argv))
    case = Case(**{name: chosen[name] for name in asdict(Case())})
    found = measure(MESHES, case)
    print_table(table(found, case))
    problems = missed(found, case)
    if chosen["json"]:
        meshes = {mesh: {name: asdict(measured) for name, measured in each.items()} for mesh, each in found.items()}
        document = {"jax": jax.__version__, "case": asdict(case), "meshes": meshes, "missed": problems}
        chosen["json"].write_text(json.dumps(document, indent=2) + "\n")
    for line in problems:
        print(f"missed: {line}", file=sys.stderr)
    if chosen["plot"]:
        try:
            plot(found, case, chosen["plot"])
        except ModuleNotFoundError as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
    return 1 if problems else 0


def _batch_axes(mesh: Mesh) -> Any:
    return tuple(axis for axis in mesh.axis_names if axis in ("data", "fsdp")) or None


def _arrays(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(case.batch, case.length, case.embed)).astype(np.float32)
    head = (draw.normal(size=(case.embed, case.vocab)) * 0.1).astype(np.float32)
    return x, head, draw.integers(0, case.vocab, (case.batch, case.length)).astype(np.int32)


if __name__ == "__main__":
    sys.exit(main())
