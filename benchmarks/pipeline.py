"""A pipelined step of the toolkit beside GPipe by hand: CPU seconds, compile time, temporaries, bytes, permutes.

The hand-written pipelines (`plain_pipeline.py`): `every tick` computes bubbles too and leaves the data axis to the
compiler, `skipping` skips them and reduces gradients once. All programs compute the same losses from the same weights,
checked first. Times are CPU seconds of the process, user + system: each round runs every program once, in another
order, and the least of the rounds counts. Exit status 1 when the toolkit misses a limit.

    python -m benchmarks.pipeline [--mesh stage=4,data=2] [--microbatches 8 32 64] [--schedule 1f1b] [--only plain]
"""

import argparse
import functools
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import shardlib as sl
from benchmarks import plain_gpt, plain_pipeline
from benchmarks.plain_pipeline import EVERY_TICK, SKIPPING, Form
from benchmarks.variants import FULL, MICRO, Case, Prepared
from meshes.build import shape_of
from models import gpt
from shardlib.audit.hlo import parse
from shardlib.audit.memory import read_memory
from shardlib.audit.program import Program, axes_of, totals
from shardlib.step import TrainState
from shardlib.tree_paths import leaves_with_paths

EVERY: Final = "every tick"
SKIP: Final = "skipping"
OURS: Final = "toolkit"
FORMS: Final[dict[str, Form]] = {EVERY: EVERY_TICK, SKIP: SKIPPING}
MESHES: Final = ("stage=4,data=2", "stage=4,tensor=2")
MICROBATCHES: Final = (8, 32, 64)
ROWS: Final = 2  # per data shard and microbatch
LOSS_TOLERANCE: Final = 1e-5
NUM_CHECKED_STEPS: Final = 2

# Measured quantities, with their heading and divisor.
COLUMNS: Final = {
    "step_cpu_seconds": ("step, CPU s", 1),
    "compile_cpu_seconds": ("compile, CPU s", 1),
    "temp_bytes": ("temporaries, MiB", 2**20),
    "reduced_bytes": ("all-reduced, MiB", 2**20),
    "gradient_bytes": ("gradients, MiB", 2**20),
    "permutes": ("permutes", 1),
    "permutes_run": ("run", 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The toolkit's value over a hand-written pipeline's, at most; a static value.

    Args:
        quantity: of `COLUMNS`.
        against: name of the hand-written pipeline.
        most: the largest ratio that is met.
        microbatches: where it is judged; None everywhere.
        residuals: judged only when this is what the toolkit stores; None always.
    """

    quantity: str
    against: str
    most: float
    microbatches: int | None = None
    residuals: str | None = None


LIMITS: Final = (
    Limit(quantity="step_cpu_seconds", against=EVERY, most=0.78, microbatches=8),
    Limit(quantity="step_cpu_seconds", against=EVERY, most=0.95, microbatches=32),
    Limit(quantity="step_cpu_seconds", against=SKIP, most=1.03),
    Limit(quantity="compile_cpu_seconds", against=SKIP, most=1.3),
    *(Limit(quantity="temp_bytes", against=n, most=1.0, microbatches=32, residuals="full") for n in FORMS),
    *(Limit(quantity="temp_bytes", against=n, most=0.7, microbatches=64, residuals="full") for n in FORMS),
    # The scalars of the metrics may differ: tens of bytes in tens of MiB.
    Limit(quantity="gradient_bytes", against=SKIP, most=1.00001),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One program at one mesh and number of microbatches.

    Args:
        values: per quantity of `COLUMNS`, one value per round; a single one for what does not vary.
        losses: of the first steps.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def least(self, quantity: str) -> float:
        """The smallest value: what disturbs a time only adds to it."""
        return min(self.values[quantity])


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where the programs are compared; a static value."""

    mesh: str
    microbatches: int


Found = dict[str, Measured]  # program -> what was measured
Results = dict[Point, Found]
Programs = dict[str, Callable[[], Prepared]]


def case_at(mesh: str, microbatches: int, *, quick: bool = False) -> Case:
    """The GPT whose layers are recomputed by the pipelines themselves; tiny when quick, with the same layers."""
    case = Case(
        config=replace(MICRO, layers=FULL.layers) if quick else FULL, batch=0, mesh=mesh, num_microbatches=microbatches
    )
    shards = dict(case.make_mesh().shape).get(plain_pipeline.DATA, 1)
    return replace(case, config=replace(case.config, remat=False), batch=ROWS * shards * microbatches)


def plain_step(case: Case, form: Form) -> Prepared:
    """A hand-written pipeline."""
    mesh, optimizer = case.make_mesh(), case.optimizer()
    abstract_params = jax.eval_shape(functools.partial(plain_gpt.init_params, c=case.config), jax.random.key(0))
    specs = plain_pipeline.param_specs(mesh)
    moments = optax.ScaleByAdamState(count=P(), mu=specs, nu=specs)  # pyright: ignore[reportArgumentType]
    placed = plain_gpt.named((specs, (moments, optax.EmptyState(), optax.EmptyState())), mesh)
    rows = NamedSharding(mesh, P(plain_pipeline.DATA if plain_pipeline.DATA in mesh.axis_names else None))
    step = functools.partial(
        plain_pipeline.train_step,
        mesh=mesh,
        form=form,
        num_microbatches=case.num_microbatches,
        optimizer=optimizer,
    )
    jitted = jax.jit(
        step, in_shardings=(placed, rows), out_shardings=(placed, NamedSharding(mesh, P())), donate_argnums=0
    )
    state = (abstract_params, jax.eval_shape(optimizer.init, abstract_params))
    compile = functools.cache(lambda: jitted.lower(state, case.abstract_tokens()).compile())
    return Prepared(
        compile=compile,
        start=lambda weights: jax.jit(lambda w: (w, optimizer.init(w)), out_shardings=placed)(weights),
        step=lambda state, batch: compile()(state, batch),
        place_batch=lambda batch: jax.device_put(batch, rows),
    )


def toolkit_step(case: Case, *, schedule: str, residuals: str | None) -> Prepared:
    """The toolkit's pipeline of `models.gpt`."""
    module, loss, batch_spec = gpt.build(case.config, batch=case.batch)
    options: dict[str, Any] = {"schedule": schedule} | ({} if residuals is None else {"residuals": residuals})
    plan = sl.Plan(mesh=case.mesh, num_microbatches=case.num_microbatches, **options)  # pyright: ignore[reportArgumentType]
    bound = sl.bind(module, loss, plan, batch_spec)
    trainer = sl.Trainer(bound, case.optimizer(), mesh=case.make_mesh(), check_separable=False)

    def start(weights: Any) -> Any:
        by_path = dict(leaves_with_paths(weights))
        leaves = [by_path[path] for path, _ in leaves_with_paths(bound.abstract_params)]
        params = jax.tree.unflatten(jax.tree.structure(bound.abstract_params), leaves)
        opt_state = trainer.optimizer.init(params)
        state = TrainState(step=np.zeros((), np.int32), params=params, opt_state=opt_state, rng=jax.random.key(0))
        return jax.device_put(state, trainer.state_shardings)

    return Prepared(
        compile=lambda: trainer.compiled,
        start=start,
        step=trainer.step,
        place_batch=lambda batch: jax.device_put(batch, trainer.batch_shardings),
    )


def measure(case: Case, programs: Programs, *, rounds: int, compile_rounds: int, note: Callable[[str], None]) -> Found:
    """Measures the programs in turns.

    Raises:
        AssertionError: two programs disagree about a loss, so that comparing them means nothing.
    """
    found = {name: Measured() for name in programs}
    prepared = _compile_in_turns(case, programs, found, rounds=compile_rounds, note=note)
    weights, states = case.weights(), dict[str, Any]()
    for name, each in prepared.items():
        found[name].values.update({k: [v] for k, v in _counted(each.compile(), case).items()})
        state, batch = each.start(weights), each.place_batch(case.tokens())
        for _ in range(NUM_CHECKED_STEPS):
            state, metrics = each.step(state, batch)
            found[name].losses.append(float(metrics["loss"]))
        states[name] = state
    check_losses(found)
    for turn in range(rounds):
        note(f"{case.mesh}, {case.num_microbatches} microbatches: step round {turn + 1} of {rounds}")
        for name in _shuffled(list(programs), turn):
            batch = prepared[name].place_batch(case.tokens())
            start = time.process_time()
            states[name], metrics = prepared[name].step(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            found[name].values.setdefault("step_cpu_seconds", []).append(time.process_time() - start)
    return found


def _compile_in_turns(
    case: Case, programs: Programs, found: Found, *, rounds: int, note: Callable[[str], None]
) -> dict[str, Prepared]:
    """Compiles every program from scratch in each round; returns those of the last round."""
    prepared: dict[str, Prepared] = {}
    for turn in range(rounds):
        note(f"{case.mesh}, {case.num_microbatches} microbatches: compile round {turn + 1} of {rounds}")
        for name in _shuffled(list(programs), turn):
            jax.clear_caches()
            prepared[name] = programs[name]()
            start = time.process_time()
            prepared[name].compile()
            found[name].values.setdefault("compile_cpu_seconds", []).append(time.process_time() - start)
    return prepared


def _shuffled(names: Sequence[str], turn: int) -> list[str]:
    """The order of one round, the same in every run: nobody always follows the same neighbour's warm caches."""
    return random.Random(turn).sample(list(names), len(names))


def _counted(compiled: jax.stages.Compiled, case: Case) -> dict[str, float]:
    """What the compiled program says of itself, per device and step."""
    program = parse(compiled.as_text() or "")
    permutes = totals(program.of_kind("collective-permute"))
    return {
        "temp_bytes": read_memory(compiled).temp_bytes,
        "reduced_bytes": totals(program.of_kind("all-reduce")).bytes_per_device or 0.0,
        "gradient_bytes": gradient_bytes(program, case),
        "permutes": permutes.num_instructions,
        "permutes_run": permutes.times_executed or 0,
    }


def gradient_bytes(program: Program, case: Case) -> float:
    """Bytes each device sends per step to reduce gradients over stage and data.

    Gathers over these axes count too: a reduce-scatter of gradients and the gather of the parameters that they update
    are an all-reduce in two parts. What runs over tensor alone belongs to the layers, whatever the schedule.
    """
    shape = shape_of(case.make_mesh())
    exchanges = [each for kind in ("all-reduce", "reduce-scatter", "all-gather") for each in program.of_kind(kind)]
    return totals(tuple(each for each in exchanges if axes_of(each, shape).axes != ("tensor",))).bytes_per_device or 0.0


def check_losses(found: Found) -> None:
    """Raises AssertionError unless all programs computed the same losses, and these fall."""
    reference = next(iter(found.values())).losses
    for name, each in found.items():
        assert np.allclose(each.losses, reference, rtol=0, atol=LOSS_TOLERANCE), (name, each.losses, reference)
    assert all(later < earlier for earlier, later in itertools.pairwise(reference)), reference


def ratio(found: Found, quantity: str, *, against: str) -> float:
    """The toolkit's least value over a hand-written pipeline's; 1 where both are 0."""
    mine, base = found[OURS].least(quantity), found[against].least(quantity)
    return mine / base if base else 1.0 if not mine else float("inf")


def judged(results: Results, *, residuals: str | None) -> list[tuple[Point, Limit, float]]:
    """Every limit that applies to what was measured, with the toolkit's ratio."""
    return [
        (point, limit, ratio(found, limit.quantity, against=limit.against))
        for point, found in results.items()
        for limit in LIMITS
        if OURS in found and limit.against in found
        if limit.microbatches in (None, point.microbatches) and limit.residuals in (None, residuals)
    ]


def missed(results: Results, *, residuals: str | None) -> list[str]:
    """One line per limit that the toolkit does not meet."""
    return [
        f"{point.mesh}, {point.microbatches} microbatches: {limit.quantity} is {value:.4f} of {limit.against!r}, "
        f"above {limit.most}"
        for point, limit, value in judged(results, residuals=residuals)
        if value > limit.most
    ]


def table(results: Results) -> Table:
    """All values; behind the toolkit's, its ratios to the hand-written pipelines."""
    headings = [heading for heading, _ in COLUMNS.values()]
    bases = ", ".join(repr(name) for name in FORMS)
    shown = Table("mesh", "microbatches", "program", *headings, title=f"per step and device; in brackets: over {bases}")
    for point, found in results.items():
        for index, name in enumerate(found):
            cells = [_cell(found, name, quantity, divisor) for quantity, (_, divisor) in COLUMNS.items()]
            shown.add_row(*((point.mesh, str(point.microbatches)) if index == 0 else ("", "")), name, *cells)
        shown.add_section()
    return shown


def _cell(found: Found, name: str, quantity: str, divisor: int) -> str:
    value = found[name].least(quantity) / divisor
    text = f"{value:.0f}" if quantity.startswith("permutes") else f"{value:.2f}"
    if name != OURS or not any(base in found for base in FORMS):
        return text
    return f"{text} ({', '.join(f'{ratio(found, quantity, against=base):.3f}' for base in FORMS if base in found)})"


def limits_table(results: Results, *, residuals: str | None) -> Table:
    """Every limit beside what was measured."""
    shown = Table("mesh", "microbatches", "quantity", "over", "ratio", "limit", "", title="limits of the toolkit")
    for point, limit, value in judged(results, residuals=residuals):
        verdict = "met" if value <= limit.most else "missed"
        row = (point.mesh, str(point.microbatches), limit.quantity, limit.against, f"{value:.3f}", f"{limit.most:g}")
        shown.add_row(*row, verdict)
    return shown


def to_json(results: Results, *, residuals: str | None) -> dict[str, Any]:
    """All values and misses as plain JSON values."""
    points = [
        {
            "mesh": point.mesh,
            "microbatches": point.microbatches,
            "programs": {name: {"values": each.values, "losses": each.losses} for name, each in found.items()},
        }
        for point, found in results.items()
    ]
    return {"jax": jax.__version__, "points": points, "missed": missed(results, residuals=residuals)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--mesh", action="append", help=f"measure only this mesh (repeatable); all: {MESHES}")
    parser.add_argument("--microbatches", type=int, nargs="+", default=MICROBATCHES, metavar="M")
    parser.add_argument("--schedule", default="1f1b", help="of the toolkit's pipeline")
    parser.add_argument("--residuals", default="full", help="what the toolkit stores for the backward pass")
    parser.add_argument("--only", choices=("plain", "toolkit"), help="measure only the hand-written pipelines, or ours")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of steps")
    parser.add_argument("--compile-repeat", type=int, default=2, help="rounds of compilations")
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it runs; its times say nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured as JSON")
    chosen = parser.parse_args(argv)
    results: Results = {}
    points = [Point(mesh=mesh, microbatches=m) for mesh in chosen.mesh or MESHES for m in chosen.microbatches]
    for point in points:
        case = case_at(point.mesh, point.microbatches, quick=chosen.quick)
        programs: Programs = {}
        if chosen.only != "toolkit":
            programs |= {name: functools.partial(plain_step, case, form) for name, form in FORMS.items()}
        if chosen.only != "plain":
            programs[OURS] = functools.partial(toolkit_step, case, schedule=chosen.schedule, residuals=chosen.residuals)
        results[point] = measure(
            case,
            programs,
            rounds=chosen.repeat,
            compile_rounds=chosen.compile_repeat,
            note=lambda line: print(line, file=sys.stderr, flush=True),
        )
        if chosen.json:  # after every point: a long run that is cut short has told something
            chosen.json.write_text(json.dumps(to_json(results, residuals=chosen.residuals), indent=2) + "\n")
    console = Console()
    wide = Console(width=None if console.is_terminal else 200)  # a pipe has no width: as wide as the tables need
    wide.print(table(results))
    if chosen.only is None:
        wide.print(limits_table(results, residuals=chosen.residuals))
    problems = [] if chosen.quick else missed(results, residuals=chosen.residuals)
    for line in problems:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
