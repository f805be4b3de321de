"""The `shardlib` command: one Typer application, one module per command.

Imports no JAX: each command imports what it needs when it runs, so that `--help` answers at once.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence

import typer

from shardlib._version import __version__
from shardlib.cli.demo import demo
from shardlib.cli.explain import explain
from shardlib.cli.output import USAGE, note, user_errors
from shardlib.cli.schedule import schedule
from shardlib.cli.train import train

NAME = "shardlib"

app = typer.Typer(
    name=NAME,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shardlib {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Name a mesh; see every sharding decision; train a Flax model on it with the numbers of one device."""
    if context.invoked_subcommand is None:
        note(context.get_help())
        raise typer.Exit(USAGE)


def _register(command: Callable[..., None], *, required: str = "", short: str, example: str) -> None:
    @functools.wraps(command)
    def guarded(**options: object) -> None:
        # Inside the parser's own handlers, which would give a closed pipe exit status 1.
        with user_errors():
            command(**options)

    app.command(options_metavar=f"{required} [OPTIONS]".strip(), short_help=short, epilog=f"Example: {NAME} {example}")(
        guarded
    )


_register(
    explain,
    required="--mesh MESH",
    short="Every array: its spec, its bytes, and why.",
    example="explain models.gpt:small --mesh data=2,tensor=4",
)
_register(
    train,
    required="--mesh MESH --steps N",
    short="Train on text over a mesh.",
    example="train models.gpt:small --mesh data=2,tensor=4 --steps 100",
)
_register(demo, short="One model, three meshes, one loss curve.", example="demo")
_register(schedule, short="A pipeline schedule: grid, bubbles, memory.", example="schedule 1f1b --stages 4")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script and of `python -m shardlib`; ends in SystemExit.

    Args:
        arguments: instead of `sys.argv[1:]`.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder first, as `python -m` does: MODEL may be the user's own file
    _mend_streams()
    with user_errors():
        status = app(args=arguments, prog_name=NAME, standalone_mode=False)
        if isinstance(status, int) and status:
            raise SystemExit(status)
    raise SystemExit(0)


def _mend_streams() -> None:
    """Streams that cannot fail on a character: `?` for one that the encoding lacks, nothing into a closed stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as we run
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
