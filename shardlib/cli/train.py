"""`shardlib train MODEL --mesh ... --steps N`: train on real text, progress while it runs, a summary at the end."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardlib.cli.options import (
    Batch,
    Json,
    JsonSchema,
    Length,
    Model,
    Optimizer,
    RulesFile,
    clip_norm,
    learning_rate,
    whole_number,
)
from shardlib.cli.output import CheckFailed, note, print_json, stdout_for_results
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

# Losses of two layouts are the same numbers summed in another order. Each step feeds rounding back through the
# optimizer, so the comparison over a whole run allows more than the 1e-6 of a single step.
SAME_LOSS = {"float32": 1e-5, "bfloat16": 2e-2}


def train(
    model: Model,
    steps: Annotated[
        int, typer.Option(metavar="N", parser=whole_number("--steps", example=100), help="Optimizer steps.")
    ],
    mesh: Mesh = None,
    data: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Text file or folder (repeat it); else Python's source.")
    ] = None,
    batch: Batch = None,
    length: Length = None,
    lr: Annotated[float, typer.Option(metavar="X", parser=learning_rate, help="Learning rate.")] = 1e-3,
    optimizer: Optimizer = "adamw",
    clip: Annotated[
        float | None, typer.Option(metavar="X", parser=clip_norm, help="Largest global norm of the gradients.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=whole_number("--seed", least=0, example=0),
            help="Of initial values, data order and dropout.",
        ),
    ] = 0,
    rules: RulesFile = None,
    plan: PlanFile = None,
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
    eval_every: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole_number("--eval-every", example=10), help="Evaluate on held-out text."),
    ] = None,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help="Trace the steps after the first.")] = None,
    devices: Annotated[
        Literal["auto", "real", "cpu"], typer.Option(help="Accelerators (real), emulated (cpu), or what there is.")
    ] = "auto",
    oracle: Annotated[bool, typer.Option("--oracle", help="Repeat on one device and compare every loss.")] = False,
    json: Json = False,
    json_schema: JsonSchema = False,
) -> None:
    """Train a model on text over a mesh; the losses are those of one device."""
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
    make_plan = lambda plan_from: plan_from(mesh, file=plan, rules=rules, changes=changes)  # noqa: E731
    _train(
        make_plan,
        count_microbatches="num_microbatches" not in changes and plan is None,
        model=model,
        steps=steps,
        sizes={"batch": batch, "length": length},
        paths=data,
        optimizer=(optimizer, lr, clip),
        oracle=oracle,
        json=json,
        session={"seed": seed, "devices": devices, "profile": profile, "eval_every": eval_every},
    )


def _train(
    make_plan: Any,
    *,
    count_microbatches: bool,
    model: str,
    steps: int,
    sizes: dict[str, int | None],
    paths: list[Path] | None,
    optimizer: tuple[str, float, float | None],
    oracle: bool,
    json: bool,
    session: dict[str, Any],
) -> None:
    # Imported here, not above: `shardlib --help` must not wait for JAX.
    from shardlib.cli.inputs import one_device, optimizer_from, plan_from, sized
    from shardlib.cli.microbatches import with_microbatches
    from shardlib.cli.model import load
    from shardlib.cli.session import Session, corpus, reserve_devices, with_sizes

    chosen = make_plan(plan_from)
    reserve_devices(chosen.mesh, session["devices"])
    name, learning_rate, clip = optimizer
    chosen_optimizer = optimizer_from(name, learning_rate, clip=clip)
    loaded = load(model)
    run_of = Session(
        model=loaded,
        batch_spec=sized(loaded, **sizes),
        optimizer=chosen_optimizer,
        corpus=corpus(paths),
        **session,
    )
    run_of.check()
    chosen = with_sizes(chosen, session["devices"])
    chosen, said = with_microbatches(chosen, run_of.batch_spec) if count_microbatches else (chosen, ())
    with stdout_for_results():
        main = run_of.bind(chosen)
        for line in said:
            note(line)
        run = run_of.train(main, steps)
        result = run_of.summary(main, run)
        if oracle:
            single = run_of.bind(one_device(chosen))
            tolerance = SAME_LOSS[chosen.compute_dtype]
            result["oracle"] = compare(run.losses, run_of.train(single, steps).losses, tolerance=tolerance)
    if json:
        print_json(result)
    else:
        _print_summary(result)
    if oracle and not result["oracle"]["equal"]:
        worst, allowed = (result["oracle"][key] for key in ("max_relative_difference", "tolerance"))
        raise CheckFailed(
            f"the losses on {chosen.mesh} differ from one device's by {worst:.2e} relative, above {allowed:.0e}"
        )


def compare(losses: Any, expected: Any, *, tolerance: float) -> dict[str, Any]:
    """How far two runs' losses are apart, relative, over all steps."""
    worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, expected, strict=True))
    return {
        "losses": list(expected),
        "max_relative_difference": worst,
        "tolerance": tolerance,
        "equal": bool(worst <= tolerance),
    }


def _print_summary(result: dict[str, Any]) -> None:
    from shardlib.explanation import bytes_text

    losses = result["losses"]
    print(f"mesh {result['mesh']} on {result['devices']} {result['platform']} devices, {len(losses)} steps")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"{result['tokens_per_second']:,.0f} tokens per second, compiled once in {result['compile_seconds']:.1f} s")
    print(
        f"{bytes_text(result['bytes_per_device'])} of parameters and optimizer state per device, "
        f"{bytes_text(result['temporary_bytes_per_device'])} of temporaries"
    )
    for line in result["plan"]:
        print(line)
    for one in result.get("evaluations", []):
        print(f"after step {one['step']}: held-out loss {one['loss']:.4f}")
    if "oracle" in result:
        check = result["oracle"]
        for step in _some_steps(len(losses)):
            print(f"step {step + 1:>4}: loss {losses[step]:.6f} on the mesh, {check['losses'][step]:.6f} on one device")
        verdict = "the same losses" if check["equal"] else "DIFFERENT losses"
        print(f"{verdict} as one device: largest relative difference {check['max_relative_difference']:.1e}")


def _some_steps(count: int) -> list[int]:
    """First, last, and a few in between."""
    return sorted({round(i * (count - 1) / 4) for i in range(5)})
