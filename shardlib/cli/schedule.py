"""`shardlib schedule NAME ...`: a pipeline schedule on the terminal, as a picture, a table, a trace. Imports no JAX."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shardlib.cli.output import CheckFailed, MissingDependency, note, print_json

SYNTHESIZE = "synthesize"


def schedule(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A schedule, a .csv or .json file, or synthesize.")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Pipeline stages (ranks); 4, or what the file has.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches; 8, or what the file has.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Virtual stages per rank; what the schedule prefers.")] = None,
    costs: Annotated[
        str, typer.Option(help="Whole backward B, its weight part W; also link, embedding, head, stash; F=1:1:2:1.")
    ] = "F=1,B=2,W=1,link=0",
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="As one scan over ticks, as the executor runs it.")
    ] = False,
    idle: Annotated[
        str, typer.Option(help="In lockstep, idle slots cost nothing (skip) or everything (mask).")
    ] = "skip",
    compare: Annotated[bool, typer.Option("--compare", help="All schedules at this size, and which wins.")] = False,
    max_activations: Annotated[float | None, typer.Option(help="Limit on live activations per rank.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Gantt chart with the memory curve.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Chart and figures on one page.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="The table; it can be read back as NAME.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Chrome trace, for Perfetto.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show a pipeline schedule: its grid, bubbles, memory and messages, verified and simulated exactly."""
    # Imported here, not above: `shardlib --help` must answer at once.
    from meshes.errors import ShardingError
    from shardlib.pipeline.costs import Costs
    from shardlib.pipeline.simulate import simulate

    cost = Costs.parse(costs)
    if max_activations is not None and not max_activations > 0:
        raise ShardingError(f"--max-activations {max_activations:g} must be above 0", fix="--max-activations 4")
    if compare:
        if any(path is not None for path in (svg, html, csv, trace)):
            raise ShardingError(
                "--compare writes no files", fix="name one schedule with --svg, --html, --csv or --trace"
            )
        _compare(name, stages, microbatches, chunks, costs=cost, max_activations=max_activations, json=json)
        return
    if name is None:
        from shardlib.pipeline.schedules import ALL

        names = ", ".join(entry.name for entry in ALL)
        raise ShardingError(f"name a schedule: {names}, a .csv file, or {SYNTHESIZE}", fix="shardlib schedule 1f1b")
    table = _table(name, stages, microbatches, chunks, costs=cost, max_activations=max_activations)
    simulation = simulate(table, cost, lockstep=lockstep, idle=idle)
    _write(simulation, svg=svg, html=html, csv=csv, trace=trace)
    if json:
        print_json(simulation.to_dict())
    else:
        from shardlib.report.schedule_terminal import print_simulation

        print_simulation(simulation)
    peak = max(simulation.peak_activations)
    if max_activations is not None and peak > max_activations:
        raise CheckFailed(
            f"{table.name} needs {peak:g} live activations, more than --max-activations {max_activations:g}"
        )


def _table(
    name: str,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    *,
    costs: Any,
    max_activations: float | None,
) -> Any:
    """A schedule by name, from a file, or made for the costs."""
    from shardlib.pipeline.schedules import build

    if name.endswith((".csv", ".json")) or "/" in name or Path(name).is_file():
        return _read(Path(name), stages, microbatches, chunks)
    stages, microbatches = 4 if stages is None else stages, 8 if microbatches is None else microbatches
    if name != SYNTHESIZE:
        return build(name, stages=stages, microbatches=microbatches, chunks=chunks)
    return _synthesize(stages, microbatches, chunks, costs=costs, max_activations=max_activations)


def _synthesize(
    stages: int, microbatches: int, chunks: int | None, *, costs: Any, max_activations: float | None
) -> Any:
    from shardlib.pipeline.synthesize import synthesize

    try:
        found = synthesize(costs, max_activations, stages=stages, microbatches=microbatches, chunks=chunks)
    except ImportError as error:
        raise MissingDependency(f"{error}; pip install 'shardlib[planner]'") from None
    note(found.explanation)
    return found.table


def _read(path: Path, stages: int | None, microbatches: int | None, chunks: int | None) -> Any:
    """A user's own table; sizes on the command line must be the file's."""
    from meshes.errors import ShardingError
    from shardlib.pipeline.table import Table

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ShardingError(
            f"cannot read {path}: {reason}", fix="a .csv file with one line per rank: F0,F1,B0,B1"
        ) from None
    table = Table.from_json(text) if path.suffix == ".json" else Table.parse(text, name=path.stem)
    for option, wanted, found in (
        ("--stages", stages, table.num_ranks),
        ("--microbatches", microbatches, table.num_microbatches),
        ("--chunks", chunks, table.num_chunks),
    ):
        if wanted not in (None, found):
            raise ShardingError(f"{option} {wanted}, but {path} has {found}", fix=f"leave {option} out")
    return table


def _compare(
    name: str | None,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    *,
    costs: Any,
    max_activations: float | None,
    json: bool,
) -> None:
    from shardlib.pipeline.compare import compare
    from shardlib.report.schedule_summary import comparison_dict, verdict
    from shardlib.report.schedule_terminal import print_comparison

    extra = ()
    if name is not None:
        table = _table(name, stages, microbatches, chunks, costs=costs, max_activations=max_activations)
        stages, microbatches = table.num_ranks, table.num_microbatches
        extra = () if name == table.name else (table,)
    stages, microbatches = 4 if stages is None else stages, 8 if microbatches is None else microbatches
    found = compare(
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        costs=costs,
        max_activations=max_activations,
        extra=extra,
    )
    if json:
        print_json(comparison_dict(found))
    else:
        print_comparison(found)
    if found.winner() is None:
        raise CheckFailed(verdict(found)[0])


def _write(simulation: Any, *, svg: Path | None, html: Path | None, csv: Path | None, trace: Path | None) -> None:
    """The files asked for; says on stderr what was written."""
    from meshes.errors import ShardingError
    from shardlib.report.chrome_trace import chrome_trace
    from shardlib.report.gantt import gantt
    from shardlib.report.schedule_page import schedule_page

    makers = (
        (svg, gantt),
        (html, schedule_page),
        (csv, lambda simulation: simulation.table.to_csv()),
        (trace, chrome_trace),
    )
    for path, make in makers:
        if path is not None:
            try:
                path.write_text(make(simulation), encoding="utf-8")
            except OSError as error:
                raise ShardingError(
                    f"cannot write {path}: {error.strerror}", fix="a file in a folder that exists"
                ) from None
            note(f"wrote {path}")
