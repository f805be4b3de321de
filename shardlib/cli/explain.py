"""`shardlib explain MODEL --mesh ...`: every array, where it goes and why. No devices, nothing allocated."""

from typing import Annotated

import typer

from shardlib.cli.options import Batch, Json, JsonSchema, Length, Model, Optimizer, RulesFile
from shardlib.cli.output import note, print_json, stdout_for_results
from shardlib.cli.plan_options import (
    Attention,
    Balance,
    Chunks,
    Dtype,
    Idle,
    Kernels,
    Lowering,
    Mesh,
    Microbatches,
    Placement,
    PlanFile,
    RandomSlices,
    Remat,
    Residuals,
    Schedule,
    Vocabulary,
    Zero,
    plan_changes,
)


def explain(
    model: Model,
    mesh: Mesh = None,
    rules: RulesFile = None,
    plan: PlanFile = None,
    versus: Annotated[str | None, typer.Option(metavar="MESH", help="A second mesh, side by side.")] = None,
    optimizer: Optimizer = "adamw",
    batch: Batch = None,
    length: Length = None,
    microbatches: Microbatches = None,
    zero: Zero = None,
    remat: Remat = None,
    dtype: Dtype = None,
    lowering: Lowering = None,
    random_slices: RandomSlices = None,
    schedule: Schedule = None,
    chunks: Chunks = None,
    residuals: Residuals = None,
    idle: Idle = None,
    balance: Balance = None,
    vocabulary: Vocabulary = None,
    attention: Attention = None,
    kernels: Kernels = None,
    placement: Placement = None,
    json: Json = False,
    json_schema: JsonSchema = False,
) -> None:
    """Show every parameter's spec, bytes per device and the reason per dim, without devices.

    A model without annotations gets a rules file proposed instead.
    """
    # Imported here, not above: `shardlib --help` must not wait for JAX.
    from shardlib.cli.inputs import (
        bind_model,
        changes_per_mesh,
        explained,
        optimizer_from,
        parameters_of,
        plan_from,
        sized,
    )
    from shardlib.cli.microbatches import with_microbatches
    from shardlib.cli.model import load
    from shardlib.propose import is_bare, propose
    from shardlib.report.explained import print_comparison, print_explanation

    changes = plan_changes(
        microbatches=microbatches,
        zero=zero,
        remat=remat,
        dtype=dtype,
        lowering=lowering,
        random_slices=random_slices,
        schedule=schedule,
        chunks=chunks,
        residuals=residuals,
        idle=idle,
        balance=balance,
        vocabulary=vocabulary,
        attention=attention,
        kernels=kernels,
        placement=placement,
    )
    meshes = [mesh] if versus is None else [mesh, versus]
    sides = changes_per_mesh(changes, meshes)
    plans = [plan_from(text, file=plan, rules=rules, changes=own) for text, own in zip(meshes, sides, strict=True)]
    chosen_optimizer = optimizer_from(optimizer, 1e-3)
    loaded = load(model)
    spec = sized(loaded, batch=batch, length=length)
    parameters = parameters_of(loaded, spec)
    if is_bare(parameters) and not plans[0].rules.patterns:
        text = propose(parameters).to_toml()
        note(f"{model} has no logical axes. Save these patterns, correct them, and pass them with --rules FILE:")
        print_json({"proposal": text}) if json else typer.echo(text, nl=False)
        return
    said: list[str] = []
    if "num_microbatches" not in changes and plan is None:
        counted = [with_microbatches(one, spec) for one in plans]
        plans, said = [one for one, _ in counted], [line for _, lines in counted for line in lines]
    with stdout_for_results():
        found = [
            explained(bind_model(loaded, plan=one, batch_spec=spec), chosen_optimizer, name=optimizer) for one in plans
        ]
    for line in said:
        note(line)
    if json:
        print_json(found[0].to_json() if versus is None else {"versus": [one.to_json() for one in found]})
    elif versus is None:
        print_explanation(found[0])
    else:
        print_comparison(*found)
