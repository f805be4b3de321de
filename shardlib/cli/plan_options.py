"""The options that make a plan, shared by `explain` and `train`. Imports no JAX.

In: option values, None where not given. Out: what to change in a plan, for `inputs.plan_from`.

    changes = plan_changes(microbatches=4, zero=None, ...)    # {"num_microbatches": 4}
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardlib.cli.options import whole_number

Mesh = Annotated[
    str | None, typer.Option(metavar="MESH", help='Such as "data=2,tensor=4"; with --plan the file has one.')
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="A plan (JSON); other options change it.")
]
Microbatches = Annotated[
    int | None,
    typer.Option(metavar="N", parser=whole_number("--microbatches", example=4), help="Accumulated per step."),
]
Zero = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole_number("--zero", least=0, most=3, example=1),
        help="1: optimizer state over data; 2: gradients too; 3: fsdp there.",
    ),
]
Remat = Annotated[
    str | None, typer.Option(metavar="POLICY", help="full, none, dots, names:A,B or offload:A,B; else the model's own.")
]
Dtype = Annotated[
    Literal["float32", "bfloat16"] | None, typer.Option(help="Of the computation; parameters stay float32.")
]
Lowering = Annotated[
    Literal["automatic", "explicit"] | None, typer.Option(help="Of replica, data and fsdp; the plan chooses otherwise.")
]
RandomSlices = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole_number("--random-slices", example=8),
        help="Parts of the batch with a dropout key each; fixes masks across meshes.",
    ),
]


def plan_changes(
    *,
    microbatches: int | None,
    zero: int | None,
    remat: str | None,
    dtype: str | None,
    lowering: str | None,
    random_slices: int | None,
) -> dict[str, Any]:
    """The fields of `Plan` that these options set."""
    given = {
        "num_microbatches": microbatches,
        "zero": zero,
        "remat": remat,
        "compute_dtype": dtype,
        "lowering": lowering,
        "random_slices": random_slices,
    }
    if lowering == "automatic" and dtype is not None:
        given["reduce_dtype"] = dtype  # what the compiler does there
    return {name: value for name, value in given.items() if value is not None}
