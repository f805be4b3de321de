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
    learning_rate,
    whole_number,
)
from shardlib.cli.output import CheckFailed, print_json, stdout_for_results

# Losses of two layouts are the same numbers summed in another order. Each step feeds rounding back through the
# optimizer, so the comparison over a whole run allows more than the 1e-6 of a single step.
SAME_LOSS = 1e-5


def train(
    model: Model,
    mesh: Annotated[str, typer.Option(metavar="MESH", help='Such as "data=2,tensor=4"; one size may be -1.')],
    steps: Annotated[
        int, typer.Option(metavar="N", parser=whole_number("--steps", example=100), help="Optimizer steps.")
    ],
    data: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Text file or folder (repeat it); else Python's source.")
    ] = None,
    batch: Batch = None,
    length: Length = None,
    lr: Annotated[float, typer.Option(metavar="X", parser=learning_rate, help="Learning rate.")] = 1e-3,
    optimizer: Optimizer = "adamw",
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=whole_number("--seed", least=0, example=0),
            help="Of initial values, data order and dropout.",
        ),
    ] = 0,
    rules: RulesFile = None,
    devices: Annotated[
        Literal["auto", "real", "cpu"], typer.Option(help="Accelerators (real), emulated (cpu), or what there is.")
    ] = "auto",
    oracle: Annotated[bool, typer.Option("--oracle", help="Repeat on one device and compare every loss.")] = False,
    json: Json = False,
    json_schema: JsonSchema = False,
) -> None:
    """Train a model on text over a mesh; the losses are those of one device."""
    # Imported here, not above: `shardlib --help` must not wait for JAX.
    from meshes.shape import MeshShape
    from shardlib.cli.inputs import optimizer_from, read_rules, sized
    from shardlib.cli.model import load
    from shardlib.cli.session import Session, corpus, reserve_devices, with_sizes

    shape = MeshShape.parse(mesh)
    chosen_rules = read_rules(rules)
    reserve_devices(shape, devices)
    chosen_optimizer = optimizer_from(optimizer, lr)
    loaded = load(model)
    session = Session(
        model=loaded,
        batch_spec=sized(loaded, batch=batch, length=length),
        rules=chosen_rules,
        optimizer=chosen_optimizer,
        corpus=corpus(data),
        seed=seed,
        devices=devices,
    )
    session.check()
    shape = with_sizes(shape, devices)
    with stdout_for_results():
        main = session.bind(shape)
        run = session.train(main, steps)
        result = session.summary(main, run)
        if oracle:
            single = session.bind(MeshShape.parse("data=1"))
            result["oracle"] = compare(run.losses, session.train(single, steps).losses)
    if json:
        print_json(result)
    else:
        _print_summary(result)
    if oracle and not result["oracle"]["equal"]:
        worst = result["oracle"]["max_relative_difference"]
        raise CheckFailed(
            f"the losses on {shape} differ from one device's by {worst:.2e} relative, above {SAME_LOSS:.0e}"
        )


def compare(losses: Any, expected: Any) -> dict[str, Any]:
    """How far two runs' losses are apart, relative, over all steps."""
    worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, expected, strict=True))
    return {
        "losses": list(expected),
        "max_relative_difference": worst,
        "tolerance": SAME_LOSS,
        "equal": bool(worst <= SAME_LOSS),
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
    if "oracle" in result:
        check = result["oracle"]
        for step in _some_steps(len(losses)):
            print(f"step {step + 1:>4}: loss {losses[step]:.6f} on the mesh, {check['losses'][step]:.6f} on one device")
        verdict = "the same losses" if check["equal"] else "DIFFERENT losses"
        print(f"{verdict} as one device: largest relative difference {check['max_relative_difference']:.1e}")


def _some_steps(count: int) -> list[int]:
    """First, last, and a few in between."""
    return sorted({round(i * (count - 1) / 4) for i in range(5)})
