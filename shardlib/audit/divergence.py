"""Collectives that only some pipeline stages would reach: a program that has one hangs.

In: a compiled program and the mesh. Out: nothing, or an error that names the operation and the model's line.

    check_no_divergence(parse(compiled.as_text()), MeshShape.parse("stage=4,tensor=2"))

Stages branch apart: one computes while another idles. A reduction over devices of one stage is safe there, for they
branch together. A collective-permute is not, whatever its pairs: backends let every device join it.
"""

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib.audit.program import Collective, Program, axes_of

STAGE = "stage"
TOGETHER_SCOPES = ("pipeline_message", "pipeline_input", "pipeline_together")


def divergent(program: Program, mesh: MeshShape) -> tuple[Collective, ...]:
    """Collectives under a conditional that devices of several stages must join, the executor's own aside.

    Its messages, inputs on their way, and what all stages compute together sit under a condition on the tick alone,
    which is the same on every device.
    """
    return tuple(
        collective
        for collective in program.collectives
        if collective.in_branch
        and not any(scope in (collective.op_name or "") for scope in TOGETHER_SCOPES)
        and (collective.kind == "collective-permute" or STAGE in (axes_of(collective, mesh).axes or ()))
    )


def check_no_divergence(program: Program, mesh: MeshShape) -> None:
    """Raises for a program with such a collective.

    Raises:
        ShardingError: names each, with its operation and line.
    """
    found = divergent(program, mesh)
    if not found:
        return
    described = dict.fromkeys(f"- {collective.kind} for {_where(collective)}" for collective in found)
    listed = "\n".join([*described][:6])
    raise ShardingError(
        "the compiler moves data between devices inside branches that only some stages take, so that the program "
        f"would hang:\n{listed}",
        fix='Plan(idle="mask"), which computes in idle slots and branches nowhere; or change the operation so that it '
        "needs no move: separate query, key and value projections instead of splitting a fused one, no roll or shift "
        "of a dim that is split over a mesh axis",
    )


def _where(collective: Collective) -> str:
    lines = [f"{file}:{line}" for file, line in collective.source if "site-packages" not in file]
    return (collective.op_name or "an operation without a name") + (f" ({lines[0]})" if lines else "")
