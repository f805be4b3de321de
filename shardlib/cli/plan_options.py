"""The options that make a plan, shared by `explain` and `train`. Imports no JAX.

In: option values, None where not given. Out: what to change in a plan, for `inputs.plan_from`.

    changes = plan_changes(microbatches=4, zero=None, ...)    # {"num_microbatches": 4}
"""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from shardlib.cli.options import whole_number
from shardlib.cli.table_file import is_table_file, read_table

Mesh = Annotated[
    str | None, typer.Option(metavar="MESH", help='Such as "data=2,tensor=4"; with --plan the file has one.')
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="A plan (JSON); other options change it.")
]
Microbatches = Annotated[
    int | None,
    typer.Option(metavar="N", parser=whole_number("--microbatches", example=8), help="Parts of a device's rows."),
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

Schedule = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of a pipeline: 1f1b, gpipe, interleaved_1f1b, or a .csv table.")
]
Chunks = Annotated[
    int | None,
    typer.Option(metavar="N", parser=whole_number("--chunks", example=2), help="Of a pipeline: pieces per stage."),
]
Residuals = Annotated[
    str | None,
    typer.Option(metavar="POLICY", help="What a stage keeps: full (layers' inputs), stage (its own), none, dots..."),
]
Idle = Annotated[Literal["skip", "mask"] | None, typer.Option(help="Idle slots of a pipeline: branch, or mask.")]
Balance = Annotated[
    Literal["even", "cost"] | None, typer.Option(help="Layers per stage: even, or embedding and head counted.")
]
Vocabulary = Annotated[
    Literal["gathered", "spread"] | None,
    typer.Option(help="Of a pipeline: once per step, or in parts."),
]
Attention = Annotated[
    Literal["ring", "all_to_all", "gather"] | None,
    typer.Option(help="Over a context axis; chosen by the bytes it sends otherwise."),
]
Kernels = Annotated[
    Literal["fused", "reference"] | None,
    typer.Option(help="Of attention: the target's, or plain XLA."),
]
Placement = Annotated[
    Literal["contiguous", "zigzag", "striped"] | None,
    typer.Option(help="Of tokens on a context axis; what balances the work otherwise."),
]
OF_AXES: Final = {
    "stage": ("schedule", "chunks", "residuals", "idle", "balance", "vocabulary"),
    "context": ("attention", "placement"),
}
"""Fields of a plan that mean something on a mesh with that axis only; options have the same names."""


def plan_changes(
    *,
    microbatches: int | None,
    zero: int | None,
    remat: str | None,
    dtype: str | None,
    lowering: str | None,
    random_slices: int | None,
    attention: str | None,
    kernels: str | None,
    placement: str | None,
    **pipeline: Any,
) -> dict[str, Any]:
    """The fields of `Plan` that these options set; `pipeline` are those of a stage axis.

    Raises:
        ShardingError: the file of a schedule cannot be read, or has another size than an option says.
    """
    given = {
        "num_microbatches": microbatches,
        "zero": zero,
        "remat": remat,
        "compute_dtype": dtype,
        "lowering": lowering,
        "random_slices": random_slices,
        "attention": attention,
        "kernels": kernels,
        "placement": placement,
        **pipeline,
    }
    if pipeline["schedule"] is not None and is_table_file(pipeline["schedule"]):
        given |= _of_table(Path(pipeline["schedule"]), microbatches, pipeline["chunks"])
    if lowering == "automatic" and dtype is not None:
        given["reduce_dtype"] = dtype  # what the compiler does there
    return {name: value for name, value in given.items() if value is not None}


def _of_table(path: Path, microbatches: int | None, chunks: int | None) -> dict[str, Any]:
    """What the table in a file sets: the schedule as text, and the number of microbatches."""
    from meshes.errors import ShardingError

    table = read_table(path)
    for option, wanted, found in (
        ("--microbatches", microbatches, table.num_microbatches),
        ("--chunks", chunks, table.num_chunks),
    ):
        if wanted not in (None, found):
            raise ShardingError(f"{option} {wanted}, but {path} has {found}", fix=f"leave {option} out")
    return {"schedule": table.to_csv(), "num_microbatches": table.num_microbatches}
