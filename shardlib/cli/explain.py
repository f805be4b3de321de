"""`shardlib explain MODEL --mesh ...`: every array, where it goes and why. No devices, nothing allocated."""

from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.output import note, print_json


def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Import string of a callable: models.gpt:small.")],
    mesh: Annotated[str, typer.Option(help='Mesh, such as "data=2,tensor=4".')],
    rules: Annotated[Path | None, typer.Option(help="Rules file (TOML); the default rules otherwise.")] = None,
    versus: Annotated[str | None, typer.Option(metavar="MESH", help="A second mesh, side by side.")] = None,
    optimizer: Annotated[str, typer.Option(help="Import string; its state is counted.")] = "optax:adamw",
    batch: Annotated[int | None, typer.Option(help="Global batch size.")] = None,
    length: Annotated[int | None, typer.Option(help="Sequence length.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show every parameter's spec, bytes per device and the reason per dim, without devices."""
    # Imported here, not above: `shardlib --help` must not wait for JAX.
    from meshes.shape import MeshShape
    from shardlib.binding import abstract_parameters
    from shardlib.cli.inputs import bind_model, optimizer_from, read_rules, sized
    from shardlib.cli.model import load
    from shardlib.propose import is_bare, propose
    from shardlib.report.explained import print_comparison, print_explanation

    shapes = [MeshShape.parse(text) for text in (mesh, versus) if text is not None]
    chosen_rules = read_rules(rules)
    loaded = load(model)
    spec = sized(loaded, batch=batch, length=length)
    parameters = abstract_parameters(loaded.module, spec)
    if is_bare(parameters) and not chosen_rules.patterns:
        text = propose(parameters).to_toml()
        note(f"{model} has no logical axes. Save these patterns, correct them, and pass them with --rules FILE:")
        print_json({"proposal": text}) if json else typer.echo(text, nl=False)
        return
    chosen_optimizer = optimizer_from(optimizer, 1e-3)
    found = [
        bind_model(loaded, mesh=shape, rules=chosen_rules, batch_spec=spec).explain(chosen_optimizer)
        for shape in shapes
    ]
    if json:
        print_json(found[0].to_json() if versus is None else {"versus": [one.to_json() for one in found]})
    elif versus is None:
        print_explanation(found[0])
    else:
        print_comparison(*found)
