"""The `shardlib` command: one Typer application, one module per command.

Imports no JAX: each command imports what it needs when it runs, so that `--help` answers at once.
"""

import sys

import typer

from shardlib._version import __version__
from shardlib.cli.demo import demo
from shardlib.cli.explain import explain
from shardlib.cli.output import user_errors
from shardlib.cli.schedule import schedule
from shardlib.cli.train import train

app = typer.Typer(
    name="shardlib",
    help="Name a mesh; see every sharding decision; train a Flax model on it with the numbers of one device.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shardlib {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Name a mesh; see every sharding decision; train a Flax model on it with the numbers of one device."""


app.command()(explain)
app.command()(train)
app.command()(demo)
app.command()(schedule)


def main() -> None:
    """Entry point of the console script and of `python -m shardlib`."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder first, as `python -m` does: MODEL may be the user's own file
    with user_errors():
        app()
