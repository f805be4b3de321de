"""What the toolkit costs over the same GPT by hand: CPU seconds, compile time, temporaries, bytes sent.

Every way of writing it (`variants.py`) computes the same losses from the same weights, checked first. Times are CPU
seconds of the process, user + system, taken in turns: each round runs every way once, in another order, and a ratio is
the median over the rounds. Exit status 1 when the toolkit misses a threshold.

    python -m benchmarks.step_overhead [--compare explicit] [--quick] [--mesh data=8] [--rounds 5] [--json FILE]
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.variants import COMPARISONS, FULL, MICRO, Case, Prepared, Variants
from shardlib.audit.hlo import parse
from shardlib.audit.memory import read_memory
from shardlib.audit.program import totals

BASE: Final = "plain"
AGAIN: Final = "plain again"
MESHES: Final = ("data=8", "fsdp=8", "data=2,tensor=4")

# The toolkit's value over the hand-written one, at most.
# Bytes sent may differ by the scalars of the metrics: tens of bytes in tens of MiB.
MAX_RATIO: Final = {"step_cpu_seconds": 1.03, "compile_cpu_seconds": 1.10, "temp_bytes": 1.0001, "sent_bytes": 1.00001}
# Measured quantities, with their heading, unit and divisor.
COLUMNS: Final = {
    "step_cpu_seconds": ("step", "CPU s", 1),
    "compile_cpu_seconds": ("compile", "CPU s", 1),
    "prepare_cpu_seconds": ("prepare", "CPU s", 1),
    "temp_bytes": ("temporaries", "MiB", 2**20),
    "sent_bytes": ("sent", "MiB", 2**20),
    "instructions": ("instructions", "1000", 1000),
}
LOSS_TOLERANCE: Final = 1e-5
NUM_CHECKED_STEPS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One variant on one mesh.

    Args:
        values: per quantity of `COLUMNS`, one value per round; a single one for what does not vary.
        collectives: kind -> (executions, bytes sent), per device and step.
        losses: of the first steps.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    collectives: dict[str, tuple[int | None, float | None]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


Results = dict[str, dict[str, Measured]]  # mesh -> variant -> what was measured


def measure(
    case: Case, *, rounds: int, compile_rounds: int, variants: Variants, note: Callable[[str], None]
) -> dict[str, Measured]:
    """Measures the variants on one mesh, in turns.

    Raises:
        AssertionError: two variants disagree about a loss, so that comparing them means nothing.
    """
    found = {name: Measured() for name in variants}
    prepared = _compile_in_turns(case, variants, found, rounds=compile_rounds, note=note)
    weights, states = case.weights(), dict[str, Any]()
    for name, each in prepared.items():
        compiled = each.compile()
        text = compiled.as_text() or ""
        program = parse(text)
        found[name].values["instructions"] = [float(text.count(" = "))]
        found[name].values["temp_bytes"] = [read_memory(compiled).temp_bytes]
        found[name].values["sent_bytes"] = [totals(program.collectives).bytes_per_device or 0.0]
        found[name].collectives.update({k: (t.times_executed, t.bytes_per_device) for k, t in program.totals.items()})
        state, batch = each.start(weights), each.place_batch(case.tokens())
        for _ in range(NUM_CHECKED_STEPS):
            state, metrics = each.step(state, batch)
            found[name].losses.append(float(metrics["loss"]))
        states[name] = state
    check_losses(found)
    for turn in range(rounds):
        note(f"{case.mesh}: step round {turn + 1} of {rounds}")
        for name in _shuffled(list(variants), turn):
            batch = prepared[name].place_batch(case.tokens())
            start = time.process_time()
            states[name], metrics = prepared[name].step(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            found[name].values.setdefault("step_cpu_seconds", []).append(time.process_time() - start)
    return found


def _compile_in_turns(
    case: Case, variants: Variants, found: dict[str, Measured], *, rounds: int, note: Callable[[str], None]
) -> dict[str, Prepared]:
    """Prepares and compiles every variant from scratch in each round; returns those of the last round."""
    prepared: dict[str, Prepared] = {}
    for turn in range(rounds):
        note(f"{case.mesh}: compile round {turn + 1} of {rounds}")
        for name in _shuffled(list(found), turn):
            jax.clear_caches()
            start = time.process_time()
            prepared[name] = variants[name](case)
            middle = time.process_time()
            prepared[name].compile()
            found[name].values.setdefault("prepare_cpu_seconds", []).append(middle - start)
            found[name].values.setdefault("compile_cpu_seconds", []).append(time.process_time() - middle)
    return prepared


def _shuffled(names: Sequence[str], turn: int) -> list[str]:
    """The order of one round, the same in every run: nobody always follows the same neighbour's warm caches."""
    return random.Random(turn).sample(list(names), len(names))


def check_losses(found: dict[str, Measured]) -> None:
    """Raises AssertionError unless all variants computed the losses of the hand-written one, and these fall."""
    reference = found[BASE].losses
    for name, each in found.items():
        assert np.allclose(each.losses, reference, rtol=0, atol=LOSS_TOLERANCE), (name, each.losses, reference)
    assert all(later < earlier for earlier, later in itertools.pairwise(reference)), reference


def ratio(found: dict[str, Measured], name: str, quantity: str) -> float:
    """Median over the rounds of a variant's value over the hand-written one's; 1 where both are 0.

    Where the hand-written step is measured twice a round, its value is the mean of both: halving the noise of what
    everything is divided by.
    """
    twins = [found[twin].values[quantity] for twin in (BASE, AGAIN) if twin in found]
    bases = [statistics.fmean(values) for values in zip(*twins, strict=True)]
    pairs = zip(found[name].values[quantity], bases, strict=True)
    return statistics.median(mine / base if base else 1.0 if not mine else float("inf") for mine, base in pairs)


def missed(results: Results, ours: Sequence[str]) -> list[str]:
    """One line per threshold that the toolkit does not meet."""
    return [
        f"{mesh}: {name}: {quantity} is {value:.4f} of the hand-written one, above {limit}"
        for mesh, found in results.items()
        for name in ours
        if name in found
        for quantity, limit in MAX_RATIO.items()
        if (value := ratio(found, name, quantity)) > limit
    ]


def table(results: Results) -> Table:
    """All values, each with its ratio to the hand-written one."""
    headings = [f"{heading}, {unit}" for heading, unit, _ in COLUMNS.values()]
    shown = Table("mesh", "variant", *headings, title="per step and device; in brackets: over the hand-written one")
    for mesh, found in results.items():
        for name, each in found.items():
            cells = [
                f"{statistics.median(each.values[quantity]) / divisor:.2f} ({ratio(found, name, quantity):.3f})"
                for quantity, (_, _, divisor) in COLUMNS.items()
            ]
            shown.add_row(mesh if name == BASE else "", name, *cells)
        shown.add_section()
    return shown


def print_table(shown: Table) -> None:
    """To stdout; in a pipe, which has no width, as wide as the table needs."""
    console = Console()
    Console(width=None if console.is_terminal else 160).print(shown)


def to_json(results: Results, ours: Sequence[str]) -> dict[str, Any]:
    """All values, ratios and misses as plain JSON values."""
    meshes = {
        mesh: {
            name: {
                "values": each.values,
                "ratios": {quantity: ratio(found, name, quantity) for quantity in COLUMNS},
                "collectives": {k: {"times": t, "sent_bytes": b} for k, (t, b) in each.collectives.items()},
                "losses": each.losses,
            }
            for name, each in found.items()
        }
        for mesh, found in results.items()
    }
    return {"jax": jax.__version__, "thresholds": MAX_RATIO, "meshes": meshes, "missed": missed(results, ours)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 when a threshold is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_overhead", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured as JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it runs; its times say nothing")
    parser.add_argument("--mesh", action="append", help=f"measure only this mesh (repeatable); all: {MESHES}")
    parser.add_argument("--compare", choices=list(COMPARISONS), default="automatic", help="what is compared")
    parser.add_argument("--variant", action="append", metavar="NAME", help="only this one (repeatable)")
    parser.add_argument("--rounds", type=int, help="rounds of steps, 5 unless given")
    parser.add_argument("--compile-rounds", type=int, help="rounds of compilations, 2 unless given")
    chosen = parser.parse_args(argv)
    comparison = COMPARISONS[chosen.compare]
    unknown = set(chosen.variant or []) - set(comparison.variants)
    if unknown:
        parser.error(f"--variant {min(unknown)!r}: {chosen.compare} compares {', '.join(comparison.variants)}")
    picked = {BASE, *(chosen.variant or comparison.variants)}
    variants = {name: make for name, make in comparison.variants.items() if name in picked}
    results: Results = {}
    for mesh in chosen.mesh or MESHES:
        results[mesh] = measure(
            Case(
                config=MICRO if chosen.quick else FULL,
                batch=comparison.batch,
                mesh=mesh,
                num_microbatches=comparison.num_microbatches,
            ),
            rounds=chosen.rounds or (1 if chosen.quick else 5),
            compile_rounds=chosen.compile_rounds or (1 if chosen.quick else 2),
            variants=variants,
            note=lambda line: print(line, file=sys.stderr, flush=True),
        )
        if chosen.json:  # after every mesh: a long run that is cut short has told something
            chosen.json.write_text(json.dumps(to_json(results, comparison.ours), indent=2) + "\n")
    print_table(table(results))
    problems = [] if chosen.quick else missed(results, comparison.ours)
    for line in problems:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
