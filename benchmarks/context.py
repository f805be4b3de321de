"""Attention over a divided sequence, kind beside kind: traffic, work, memory and CPU seconds.

In: nothing; emulated CPU devices. Each kind is compiled with its gradients under a causal mask: bytes a device sends,
unmasked scores of the busiest device, temporaries at three lengths, CPU seconds of all devices together in rounds that
take turns. Then the activations of a train step of 32,768 tokens, over the context axis and on one device. Exit status
1 when a kind does not send its formula, or activations need more than their share of one device's, which is not judged
with --quick.

    python -m benchmarks.context [--quick] [--context 4] [--plot FILE] [--json FILE]
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

from benchmarks.pictures import new_figure
from benchmarks.step_overhead import print_table
from meshes import make_mesh
from models import llama
from shardlib import annotate
from shardlib.audit.hlo import parse
from shardlib.audit.memory import read_memory
from shardlib.binding import bind
from shardlib.ops.context_attention import context_attention
from shardlib.ops.context_choice import all_to_all_sent, gather_sent, ring_sent
from shardlib.ops.context_layout import order
from shardlib.ops.ring_attention import ring_attention
from shardlib.plan import Plan
from shardlib.trainer import Trainer

KINDS: Final = {
    "zigzag ring": ("ring", "zigzag"),
    "contiguous ring": ("ring", "contiguous"),
    "all-gather": ("gather", "zigzag"),
    "all-to-all": ("all_to_all", "contiguous"),
}
"""Kind and placement by name."""

MAX_SHARE: Final = 1.1
"""Activations of a train step over one device's, times the context axis."""
WIDTHS: Final = {"layers": 2, "embed": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 4096}
"""Of the model of the train step: Llama 3.1 8B, but for layers and vocabulary."""
MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of one measurement; a static value."""

    context: int = 4
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    timed_length: int = 2048
    step_length: int = 32768
    step_widths: Mapping[str, int] = field(default_factory=lambda: WIDTHS)
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    rounds: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one kind needs; a static value.

    Args:
        sent_bytes: per device at the longest length, forward and backward, read from the compiled program.
        formula_bytes: what the toolkit promises there.
        scores: unmasked scores of the busiest device at the longest length.
        balance: those over the mean of all devices.
        temp_bytes: peak per device, by length.
        cpu_seconds: of all devices together at the length that is timed, the median over rounds.
    """

    sent_bytes: float
    formula_bytes: float
    scores: int
    balance: float
    temp_bytes: Mapping[int, int]
    cpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Activations of a train step per device, in bytes; a static value.

    Args:
        context: over the context axis.
        one_device: on one device, whose attention makes all scores at once.
        one_device_tiled: on one device, with the ring's own tiles.
    """

    context: int
    one_device: int
    one_device_tiled: int


def compiled(name: str, case: Case, length: int) -> tuple[Any, Any]:
    """The compiled attention with gradients of one kind, and its operands in place."""
    kind, placement = KINDS[name]
    mesh = make_mesh(f"context={case.context}")
    attend = functools.partial(
        context_attention, kind=kind, axis="context", placement=placement, causal=True, mesh=mesh
    )

    def function(query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array) -> Any:
        result, backward = jax.vjp(attend, query, key, value)
        return result, backward(out)

    draw, placed = np.random.default_rng(0), NamedSharding(mesh, P(None, "context"))
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    arrays = [draw.normal(size=(1, length, count, case.head_dim)).astype(np.float32) for count in heads]
    stored = order(length, shards=case.context, placement=placement)
    operands = [jax.device_put(x[:, stored], placed) for x in arrays]
    jitted = jax.jit(function, in_shardings=(placed,) * 4, out_shardings=(placed, (placed,) * 3))
    return jitted.lower(*operands).compile(), operands


def scores(name: str, case: Case, length: int) -> tuple[int, float]:
    """Unmasked scores of the busiest device, and those over the mean."""
    kind, placement = KINDS[name]
    if kind == "all_to_all":
        return case.heads // case.context * length * (length + 1) // 2, 1.0
    seen = (order(length, shards=case.context, placement=placement) + 1).reshape(case.context, -1).sum(axis=1)
    return int(seen.max()) * case.heads, float(seen.max() / seen.mean())


def formula(name: str, case: Case, length: int) -> float:
    """Bytes that a device sends, forward and backward."""
    kind, _ = KINDS[name]
    sizes = {
        "context": case.context,
        "length": length,
        "batch": 1,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "dtype_bytes": 4,
    }
    if kind == "ring":
        return sum(ring_sent(hops=case.context - 1, **sizes))
    return 2 * all_to_all_sent(heads=case.heads, **sizes) if kind == "all_to_all" else sum(gather_sent(**sizes))


def measure(case: Case) -> dict[str, Measured]:
    """Every kind; raises AssertionError when their results differ."""
    longest, timed = max(case.lengths), case.timed_length
    made = {name: {length: compiled(name, case, length) for length in {*case.lengths, timed}} for name in KINDS}
    results = {name: _in_order(name, case, each[timed]) for name, each in made.items()}
    for name, result in results.items():
        np.testing.assert_allclose(result, results["zigzag ring"], atol=1e-4, err_msg=name)
    names = list(KINDS)
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for turn in range(case.rounds):
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            function, operands = made[name][timed]
            start = time.process_time()
            jax.block_until_ready(function(*operands))
            seconds[name].append(time.process_time() - start)
    found = {}
    for name, each in made.items():
        sent = [total.bytes_per_device or 0.0 for total in parse(each[longest][0].as_text() or "").totals.values()]
        busiest, balance = scores(name, case, longest)
        found[name] = Measured(
            sent_bytes=sum(sent),
            formula_bytes=formula(name, case, longest),
            scores=busiest,
            balance=balance,
            temp_bytes={length: read_memory(each[length][0]).temp_bytes for length in case.lengths},
            cpu_seconds=statistics.median(seconds[name]),
        )
    return found


def activations(case: Case, *, tiled: bool = False, **options: Any) -> int:
    """What a Llama's train step, its layers recomputed, holds more of at the whole length than at half of it, twice.

    Temporaries of parameters, such as their gradients, do not depend on the length, so they drop out. Only compiled.
    """
    tiles = annotate.Active(
        constrain=lambda x, names: x, ops={"attention": functools.partial(ring_attention, axis=None)}
    )

    def temporaries(length: int) -> int:
        module, loss, spec = llama.tiny(batch=1, length=length, remat=True, **case.step_widths)
        bound = bind(module, annotate.under(tiles, loss) if tiled else loss, Plan(**options), spec)
        return read_memory(Trainer(bound, optax.sgd(0.1)).compiled).temp_bytes

    return 2 * (temporaries(case.step_length) - temporaries(case.step_length // 2))


def measure_step(case: Case) -> Step:
    """Activations of the train step, divided and on one device."""
    return Step(
        context=activations(case, mesh=f"context={case.context}", attention="ring"),
        one_device=activations(case, mesh="data=1"),
        one_device_tiled=activations(case, tiled=True, mesh="data=1"),
    )


def missed(found: Mapping[str, Measured], step: Step | None, case: Case) -> list[str]:
    """One line per promise that is not kept; the train step is judged where one is given."""
    problems = [
        f"{name}: sends {each.sent_bytes:.0f} bytes, not {each.formula_bytes:.0f}"
        for name, each in found.items()
        if each.sent_bytes != each.formula_bytes
    ]
    share = 0.0 if step is None else step.context / step.one_device_tiled * case.context
    if share > MAX_SHARE:
        problems.append(f"train step: activations are {share:.2f}/{case.context} of one device's, above {MAX_SHARE}")
    return problems


def tables(found: Mapping[str, Measured], step: Step, case: Case) -> list[Table]:
    """What was measured, by kind; and the train step."""
    longest = max(case.lengths)
    sizes = f"context={case.context}, {case.heads} heads, {case.kv_heads} KV heads of {case.head_dim}, float32"
    shown = Table(
        "kind",
        "sent, MiB",
        "scores, millions",
        "of the mean",
        *(f"temporaries at {length:,}, MiB" for length in case.lengths),
        f"CPU s of all devices at {case.timed_length:,}",
        title=f"Causal attention and gradients per device at length {longest:,}: {sizes}",
    )
    for name, each in found.items():
        shown.add_row(
            name,
            f"{each.sent_bytes / MIB:.2f}",
            f"{each.scores / 1e6:.2f}",
            f"{each.balance:.2f}",
            *(f"{each.temp_bytes[length] / MIB:.2f}" for length in case.lengths),
            f"{each.cpu_seconds:.2f}",
        )
    widths = ", ".join(f"{size} {name}" for name, size in case.step_widths.items())
    train = Table(
        "train step of a Llama",
        "activations, MiB",
        f"x {case.context} / one device",
        title=f"At length {case.step_length:,}: {widths}",
    )
    for name, size in asdict(step).items():
        ratio = "" if name == "context" else f"{step.context * case.context / size:.3f}"
        train.add_row(name.replace("_", " "), f"{size / MIB:.2f}", ratio)
    return [shown, train]


def plot(found: Mapping[str, Measured], case: Case, file: Path) -> None:
    """Temporaries against length, as a picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = new_figure(figsize=(6, 4))
    axes = figure.subplots()
    for name, each in found.items():
        axes.loglog(case.lengths, [each.temp_bytes[length] / MIB for length in case.lengths], marker="o", label=name)
    axes.set(xlabel="length", ylabel="temporaries per device, MiB", title=f"Attention over context={case.context}")
    axes.legend()
    figure.savefig(file)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 when a promise is not kept, 3 when a picture cannot be drawn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to show that the script works")
    parser.add_argument("--context", type=int, default=4, help="size of the axis; 4 unless given")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw temporaries against length")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured as JSON")
    chosen = parser.parse_args(argv)
    case = Case(context=chosen.context, **(QUICK if chosen.quick else {}))
    found, step = measure(case), measure_step(case)
    for shown in tables(found, step, case):
        print_table(shown)
    problems = missed(found, None if chosen.quick else step, case)
    if chosen.json:
        kinds = {name: asdict(each) for name, each in found.items()}
        document = {"jax": jax.__version__, "case": asdict(case), "kinds": kinds, "step": asdict(step)}
        chosen.json.write_text(json.dumps({**document, "missed": problems}, indent=2) + "\n")
    for line in problems:
        print(f"missed: {line}", file=sys.stderr)
    if chosen.plot:
        try:
            plot(found, case, chosen.plot)
        except ModuleNotFoundError as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
    return 1 if problems else 0


QUICK: Final[dict[str, Any]] = {
    "step_length": 64,
    "step_widths": {"layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 64, "vocab": 64},
    "lengths": (32, 64, 128),
    "timed_length": 128,
    "kv_heads": 4,
    "head_dim": 8,
    "rounds": 1,
}


def _in_order(name: str, case: Case, made: tuple[Any, Any]) -> np.ndarray:
    """The result of a kind in the order of positions."""
    function, operands = made
    result = np.asarray(function(*operands)[0])
    stored = order(result.shape[1], shards=case.context, placement=KINDS[name][1])
    return result[:, np.argsort(stored)]


if __name__ == "__main__":
    sys.exit(main())
