"""Options that commands share: their names, their help, how their text is read. Imports no JAX.

In: text from the command line. Out: values in range, or `BadOption` with the text, the reason and the fix.

    batch: Batch = None
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.output import BadOption

LARGEST = 2**31 - 1


def whole_number(option: str, *, least: int = 1, example: int = 8, most: int = LARGEST) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(str(text), 10)
        except ValueError:
            raise _bad(option, text, "is not a whole number", example) from None
        if not least <= value <= most:
            raise _bad(option, text, f"is not from {least} to {most}", example)
        return value

    return read


def learning_rate(text: str) -> float:
    """Reads a finite number, not below 0."""
    return _number("--lr", text, example=0.001)


def clip_norm(text: str) -> float:
    """Reads a finite number above 0."""
    value = _number("--clip", text, example=1.0)
    if value == 0:
        raise _bad("--clip", text, "would make every gradient zero", 1.0)
    return value


def _number(option: str, text: str, *, example: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _bad(option, text, "is not a number", example) from None
    if not (math.isfinite(value) and value >= 0):
        raise _bad(option, text, "is not a finite number of at least 0", example)
    return value


def _bad(option: str, text: str, why: str, example: float) -> BadOption:
    shown = text if len(str(text)) <= 40 else f"{text[:40]}..."
    return BadOption(f"{option} {shown}: this {why}\n  fix: {option} {example}")


def _print_schema(context: typer.Context, wanted: bool) -> None:
    if wanted:
        from importlib.resources import files  # only for this option: --help must not wait

        schema = files("shardlib") / "schemas" / f"{context.info_name}.json"
        sys.stdout.write(schema.read_text(encoding="utf-8"))
        raise typer.Exit


Model = Annotated[str, typer.Argument(metavar="MODEL", help="module:function, such as models.gpt:small.")]
RulesFile = Annotated[
    Path | None, typer.Option("--rules", metavar="FILE", help="Rules (TOML); the default rules otherwise.")
]
Optimizer = Annotated[
    str, typer.Option(metavar="NAME", help="From optax, or module:function: learning rate -> optimizer.")
]
Batch = Annotated[
    int | None,
    typer.Option(
        metavar="N", parser=whole_number("--batch", example=16), help="Global batch size, per optimizer step."
    ),
]
Length = Annotated[
    int | None, typer.Option(metavar="N", parser=whole_number("--length", example=128), help="Sequence length.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
JsonSchema = Annotated[
    bool, typer.Option("--json-schema", callback=_print_schema, is_eager=True, help="The JSON schema of --json.")
]
