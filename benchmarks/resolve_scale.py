"""Seconds to bind and explain Llama 3.1 405B on abstract meshes of 8 to 16,384 devices, which must not grow with them.

In: nothing; no device is asked for and nothing is allocated. Exit status 1 when a mesh takes longer than two seconds
or the slowest is far above the fastest. Times are CPU seconds of the process, the least of several turns.

    python -m benchmarks.resolve_scale [--rounds 5] [--json FILE]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
from rich.table import Table

import shardlib as sl
from benchmarks.step_overhead import print_table
from meshes.build import abstract_mesh
from models import llama

MESHES: Final = (
    "data=1,fsdp=8",
    "data=1,fsdp=8,tensor=8",
    "data=2,fsdp=32,tensor=8",
    "data=4,fsdp=128,tensor=8",
    "data=16,fsdp=128,tensor=8",
)
MAX_SECONDS: Final = 2.0
MAX_SPREAD: Final = 1.5
PARTS: Final = ("bind", "resolve", "explain", "all")


def measure_once(mesh: str) -> dict[str, float]:
    """CPU seconds of each part on one mesh, JAX's caches cleared before."""
    jax.clear_caches()
    model, loss, batch_spec = llama.llama_405b()
    plan = sl.Plan(mesh=sl.MeshShape.parse(mesh))
    bound, bind_seconds = _timed(lambda: sl.bind(model, loss, plan, batch_spec))
    text, explain_seconds = _timed(lambda: str(bound.explain()))
    assert "embed" in text
    # What bind does for the parameters alone, once more on its own: resolving is the part that sees the mesh.
    _, resolve_seconds = _timed(lambda: sl.resolve(bound.abstract_params, plan.rules, abstract_mesh(plan.mesh)))
    return {
        "bind": bind_seconds,
        "resolve": resolve_seconds,
        "explain": explain_seconds,
        "all": bind_seconds + explain_seconds,
    }


def measure(meshes: Sequence[str], *, rounds: int) -> dict[str, dict[str, float]]:
    """The least of every part over the rounds, the meshes in turns, after one round that pays for imports."""
    measure_once(meshes[0])
    turns = [{mesh: measure_once(mesh) for mesh in meshes} for _ in range(rounds)]
    return {mesh: {part: min(turn[mesh][part] for turn in turns) for part in PARTS} for mesh in meshes}


def spread(found: dict[str, dict[str, float]]) -> float:
    """Slowest over fastest mesh."""
    seconds = [each["all"] for each in found.values()]
    return max(seconds) / min(seconds)


def missed(found: dict[str, dict[str, float]]) -> list[str]:
    """One line per threshold that is not met."""
    slow = [
        f"{mesh}: {each['all']:.2f} s, above {MAX_SECONDS} s"
        for mesh, each in found.items()
        if each["all"] > MAX_SECONDS
    ]
    flat = spread(found) <= MAX_SPREAD
    return slow if flat else [*slow, f"the slowest mesh takes {spread(found):.2f} of the fastest, above {MAX_SPREAD}"]


def table(found: dict[str, dict[str, float]]) -> Table:
    """Seconds by mesh."""
    shown = Table("mesh", "devices", *(f"{part}, s" for part in PARTS), title="Llama 3.1 405B, CPU seconds")
    for mesh, each in found.items():
        devices = sl.MeshShape.parse(mesh).num_devices
        shown.add_row(mesh, f"{devices:,}", *(f"{each[part]:.3f}" for part in PARTS))
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 when a threshold is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resolve_scale", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="measurements per mesh, 5 unless given")
    chosen = parser.parse_args(argv)
    found = measure(MESHES, rounds=chosen.rounds)
    print_table(table(found))
    problems = missed(found)
    if chosen.json:
        document: dict[str, Any] = {"meshes": found, "spread": spread(found), "missed": problems}
        chosen.json.write_text(json.dumps(document, indent=2) + "\n")
    for line in problems:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if problems else 0


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    value = function()
    return value, time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
