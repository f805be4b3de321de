"""`shardlib demo`: one short Flax file on three meshes, one loss curve. Needs no checkout."""

from typing import Annotated, Any

import typer

from shardlib.cli.options import Json, JsonSchema, whole_number
from shardlib.cli.output import CheckFailed, note, print_json

MODEL = "shardlib.examples.tiny:tiny"
MESHES = ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2")
LEARNING_RATE = 3e-3
_BARS = "▁▂▃▄▅▆▇█"


def demo(
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", parser=whole_number("--steps", least=2, example=60), help="Optimizer steps on each mesh."
        ),
    ] = 60,
    json: Json = False,
    json_schema: JsonSchema = False,
) -> None:
    """Train one short Flax model on three emulated meshes and compare every loss with one device's."""
    import inspect

    from meshes.shape import MeshShape
    from shardlib.cli.inputs import one_device, optimizer_from
    from shardlib.cli.model import load
    from shardlib.cli.session import Session, corpus, reserve_devices
    from shardlib.cli.train import SAME_LOSS, compare
    from shardlib.examples import tiny
    from shardlib.plan import Plan

    plans = [Plan(mesh=MeshShape.parse(text)) for text in MESHES]
    for plan in plans:
        reserve_devices(plan.mesh, "cpu")
    loaded = load(MODEL)
    session = Session(
        model=loaded,
        batch_spec=loaded.batch_spec,
        optimizer=optimizer_from("optax:adamw", LEARNING_RATE),
        corpus=corpus(None),
        seed=0,
        devices="cpu",
    )
    if not json:
        print(f"The model, {inspect.getsourcefile(tiny)}:\n\n{inspect.getsource(tiny.Tiny)}")
    runs = [session.summary(bound, session.train(bound, steps)) for bound in map(session.bind, plans)]
    note("the same steps on one device")
    expected = session.train(session.bind(one_device(plans[0])), steps).losses
    checks = [compare(run["losses"], expected, tolerance=SAME_LOSS["float32"]) for run in runs]
    if json:
        print_json({"runs": runs, "one_device": list(expected), "equal": all(check["equal"] for check in checks)})
    else:
        _print_curves(runs, checks, expected)
    if not all(check["equal"] for check in checks):
        raise CheckFailed("a mesh gave other losses than one device")


def _print_curves(runs: list[dict[str, Any]], checks: list[dict[str, Any]], expected: Any) -> None:
    from shardlib.explanation import bytes_text

    for run, check in zip(runs, checks, strict=True):
        state = bytes_text(run["bytes_per_device"])
        print(
            f"{run['mesh']:<24} loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}   {state:>10} of state "
            f"per device   off one device by {check['max_relative_difference']:.0e}"
        )
    print(f"{'one device':<24} loss {expected[0]:.4f} -> {expected[-1]:.4f}   {_sparkline(expected)}")
    print("one model, three meshes, one loss curve")


def _sparkline(losses: Any, width: int = 40) -> str:
    picked = [losses[round(i * (len(losses) - 1) / (width - 1))] for i in range(min(width, len(losses)))]
    low, high = min(picked), max(picked)
    return "".join(_BARS[round((value - low) / ((high - low) or 1) * (len(_BARS) - 1))] for value in picked)
