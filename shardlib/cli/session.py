"""One training session of the command line: model, data, optimizer; any number of meshes under the same steps.

In: what the options say. Out: runs and their summaries.

    session = Session(model=loaded, ...); run = session.train(session.bind(shape), 100)
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshes.build import make_mesh
from meshes.errors import ShardingError
from meshes.shape import MeshShape
from shardlib.binding import Bound
from shardlib.cli.inputs import bind_model
from shardlib.cli.model import Loaded
from shardlib.cli.output import CheckFailed, color_wanted, note
from shardlib.data import ByteCorpus
from shardlib.loop import NonFiniteLoss, Run, train
from shardlib.rules import Rules
from shardlib.trainer import Trainer

SECONDS_BETWEEN_LINES = 10.0
NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What all runs of one command share."""

    model: Loaded
    batch_spec: Any
    rules: Rules
    optimizer: optax.GradientTransformation
    paths: list[Path]
    seed: int
    devices: str

    def bind(self, shape: MeshShape) -> Bound:
        """The model under a plan for the mesh; nothing is allocated, no device is touched."""
        bound = bind_model(self.model, mesh=shape, rules=self.rules, batch_spec=self.batch_spec)
        _check_reads_bytes(self.batch_spec, bound)
        return bound

    def train(self, bound: Bound, steps: int) -> Run:
        """Trains on the mesh of the plan, with progress on stderr."""
        for notice in bound.notices:
            note(f"notice: {notice}")
        corpus = ByteCorpus(self.paths or None)
        batch, length = self.batch_spec["inputs"].shape
        trainer = Trainer(bound, self.optimizer, mesh=make_mesh(bound.plan.mesh, devices=self.devices))
        batch_at = lambda step: corpus.batch(step, batch=batch, length=length, seed=self.seed)  # noqa: E731
        with progress(f"{bound.plan.mesh}", steps) as on_step:
            try:
                return train(trainer, batch_at, num_steps=steps, seed=self.seed, on_step=on_step)
            except NonFiniteLoss as error:
                raise CheckFailed(str(error)) from None

    def summary(self, bound: Bound, run: Run) -> dict[str, Any]:
        """The run as plain JSON values."""
        batch, length = self.batch_spec["inputs"].shape
        return {
            "model": self.model.name,
            "mesh": str(bound.plan.mesh),
            "devices": bound.plan.mesh.num_devices,
            "platform": run.platform,
            "num_parameters": bound.explain(self.optimizer).num_parameters,
            "steps": len(run.losses),
            "losses": list(run.losses),
            "tokens_per_second": run.steps_per_second * batch * length,
            "compile_seconds": run.compile_seconds,
            "bytes_per_device": run.state_bytes_per_device,
            "temporary_bytes_per_device": run.temporary_bytes_per_device,
        }


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar with ETA and loss on a terminal; elsewhere a line at most every ten seconds. All of it on stderr."""
    if not sys.stderr.isatty():
        yield _lines(title, steps)
        return
    console = Console(file=sys.stderr, no_color=not color_wanted(sys.stderr))
    columns = (
        TextColumn(f"{title} loss {{task.fields[loss]:.4f}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=steps, loss=float("nan"))
        yield lambda done, loss: bar.update(task, completed=done, loss=loss)


def _lines(title: str, steps: int) -> Callable[[int, float], None]:
    last = [time.monotonic()]

    def on_step(done: int, loss: float) -> None:
        if time.monotonic() - last[0] >= SECONDS_BETWEEN_LINES:
            last[0] = time.monotonic()
            note(f"{title} step {done}/{steps} loss {loss:.4f}")

    return on_step


def _check_reads_bytes(batch_spec: Any, bound: Bound) -> None:
    """The command line feeds bytes: token ids `inputs` and `targets`, and a vocabulary of at least 256."""
    names = set(batch_spec) if isinstance(batch_spec, dict) else set()
    shapes = {(leaf.shape, leaf.dtype, leaf.axes) for leaf in batch_spec.values()} if names else set()
    fits = (
        names == {"inputs", "targets"} and len(shapes) == 1 and next(iter(shapes))[1:] == ("int32", ("batch", "length"))
    )
    if not fits:
        raise ShardingError(
            "train feeds bytes as int32 inputs and targets of axes (batch, length); "
            f"the batch spec has {sorted(names)}",
            fix="give the model such a batch spec, or train it from Python with shardlib.Trainer",
        )
    for entry in bound.params.entries:
        for name, size in zip(entry.names, entry.shape, strict=True):
            if name == "vocab" and size < NUM_BYTES:
                raise ShardingError(
                    f"{entry.path} has a vocabulary of {size}, and bytes need {NUM_BYTES}: larger ids would be clipped",
                    fix=f"build the model with a vocabulary of at least {NUM_BYTES}",
                )
