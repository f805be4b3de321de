"""`shardlib schedule NAME ...`: a pipeline schedule on the terminal, as a picture, a table, a trace. Imports no JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlib.cli.options import Json, JsonSchema, whole_number
from shardlib.cli.output import CheckFailed, MissingDependency, note, print_json
from shardlib.cli.table_file import is_table_file, read_table

SYNTHESIZE = "synthesize"
STAGES, MICROBATCHES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the options say about the schedule itself; None where they say nothing."""

    stages: int | None
    microbatches: int | None
    chunks: int | None
    costs: Any
    max_activations: float | None
    prove: float | None

    @property
    def size(self) -> dict[str, int]:
        """Stages and microbatches, with their defaults."""
        stages = STAGES if self.stages is None else self.stages
        return {"stages": stages, "microbatches": MICROBATCHES if self.microbatches is None else self.microbatches}


def schedule(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A schedule, a .csv or .json file, or synthesize.")
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=whole_number("--stages", example=4), help="Stages (ranks); 4, or as the file."
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=whole_number("--microbatches", example=8), help="Microbatches; 8, or as the file."
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole_number("--chunks", example=2),
            help="Virtual stages per rank, where there is a choice.",
        ),
    ] = None,
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
    prove: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With synthesize: prove or improve by integer programming.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Gantt chart with the memory curve.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Chart and figures on one page.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="The table; it can be read back as NAME.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Chrome trace, for Perfetto.")] = None,
    json: Json = False,
    json_schema: JsonSchema = False,
) -> None:
    """Show a pipeline schedule: its grid, bubbles, memory and messages, verified and simulated exactly."""
    # Imported here, not above: `shardlib --help` must answer at once.
    from meshes.errors import ShardingError
    from shardlib.pipeline.costs import Costs
    from shardlib.pipeline.simulate import simulate

    for option, number in (("--max-activations", max_activations), ("--prove", prove)):
        if number is not None and not number > 0:
            raise ShardingError(f"{option} {number:g} must be above 0", fix=f"{option} 4")
    asked = Asked(
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        costs=Costs.parse(costs),
        max_activations=max_activations,
        prove=prove,
    )
    files = {"svg": svg, "html": html, "csv": csv, "trace": trace}
    if compare:
        _refuse_files(files)
        _compare(name, asked, json=json)
        return
    table = _table(name, asked)
    simulation = simulate(table, asked.costs, lockstep=lockstep, idle=idle)
    _write(simulation, files)
    _show(simulation, json=json)
    peak = max(simulation.peak_activations)
    if max_activations is not None and peak > max_activations:
        limit = f"--max-activations {max_activations:g}"
        raise CheckFailed(f"{table.name} needs {peak:g} live activations, more than {limit}")


def _show(simulation: Any, *, json: bool) -> None:
    """The result on stdout."""
    from shardlib.report.schedule_terminal import print_simulation

    if json:
        print_json(simulation.to_dict())
    else:
        print_simulation(simulation)


def _table(name: str | None, asked: Asked) -> Any:
    """A schedule by name, from a file, or made for the costs."""
    from meshes.errors import ShardingError
    from shardlib.pipeline.schedules import ALL, build

    if name is None:
        names = ", ".join(entry.name for entry in ALL)
        raise ShardingError(f"name a schedule: {names}, a .csv file, or {SYNTHESIZE}", fix="shardlib schedule 1f1b")
    if asked.prove is not None and name != SYNTHESIZE:
        raise ShardingError(f"--prove goes with {SYNTHESIZE}, not with {name}", fix=f"shardlib schedule {SYNTHESIZE}")
    if is_table_file(name):
        return _read(Path(name), asked)
    if name != SYNTHESIZE:
        return build(name, **asked.size, chunks=asked.chunks)
    return _synthesize(asked)


def _synthesize(asked: Asked) -> Any:
    from shardlib.pipeline.synthesize import synthesize

    try:
        found = synthesize(
            asked.costs, asked.max_activations, **asked.size, chunks=asked.chunks, prove_seconds=asked.prove
        )
    except ImportError as error:
        raise MissingDependency(str(error)) from None
    note(found.explanation)
    return found.table


def _read(path: Path, asked: Asked) -> Any:
    """A user's own table; sizes on the command line must be the file's."""
    from meshes.errors import ShardingError

    table = read_table(path)
    for option, wanted, found in (
        ("--stages", asked.stages, table.num_ranks),
        ("--microbatches", asked.microbatches, table.num_microbatches),
        ("--chunks", asked.chunks, table.num_chunks),
    ):
        if wanted not in (None, found):
            raise ShardingError(f"{option} {wanted}, but {path} has {found}", fix=f"leave {option} out")
    return table


def _compare(name: str | None, asked: Asked, *, json: bool) -> None:
    """All schedules at one size, a table of the user's own among them if one is named."""
    from shardlib.pipeline.compare import compare
    from shardlib.pipeline.schedules import ALL
    from shardlib.report.schedule_summary import comparison_dict, verdict
    from shardlib.report.schedule_terminal import print_comparison

    table = None if name is None else _table(name, asked)
    size = asked.size if table is None else {"stages": table.num_ranks, "microbatches": table.num_microbatches}
    found = compare(
        **size,
        chunks=asked.chunks,
        costs=asked.costs,
        max_activations=asked.max_activations,
        extra=() if table is None or any(name == entry.name for entry in ALL) else (table,),
    )
    if json:
        print_json(comparison_dict(found))
    else:
        print_comparison(found)
    if found.winner() is None:
        raise CheckFailed(verdict(found)[0])


def _refuse_files(files: dict[str, Path | None]) -> None:
    from meshes.errors import ShardingError

    for option, path in files.items():
        if path is not None:
            raise ShardingError(
                f"--compare writes no files, but --{option} is given", fix=f"name one schedule for --{option}"
            )


def _write(simulation: Any, files: dict[str, Path | None]) -> None:
    """The files asked for; says on stderr what was written."""
    from meshes.errors import ShardingError
    from shardlib.report.chrome_trace import chrome_trace
    from shardlib.report.gantt import gantt
    from shardlib.report.schedule_page import schedule_page

    makers = {
        "svg": gantt,
        "html": schedule_page,
        "csv": lambda simulation: simulation.table.to_csv(),
        "trace": chrome_trace,
    }
    for option, make in makers.items():
        path = files[option]
        if path is not None:
            try:
                path.write_text(make(simulation), encoding="utf-8")
            except OSError as error:
                fix = "a file in a folder that exists"
                raise ShardingError(f"cannot write {path}: {error.strerror}", fix=fix) from None
            note(f"wrote {path}")
