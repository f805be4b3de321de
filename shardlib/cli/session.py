"""One training session of the command line: model, data, optimizer; any number of meshes under the same steps.

In: what the options say. Out: runs and their summaries.

    session = Session(model=loaded, ...); run = session.train(session.bind(shape), 100)
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshes.build import make_mesh, shape_of
from meshes.errors import ShardingError
from meshes.shape import INFERRED, MeshShape
from shardlib.audit.joined_layouts import check_joined_layouts
from shardlib.audit.running_sums import check_running_sums
from shardlib.batch_spec import is_spec
from shardlib.binding import Bound
from shardlib.cli.inputs import bind_model
from shardlib.cli.model import Loaded
from shardlib.cli.output import CheckFailed, note
from shardlib.cli.user_code import user_code
from shardlib.data import ByteCorpus
from shardlib.explanation import pipeline_rows
from shardlib.loop import Evaluation, NonFiniteLoss, Run, train
from shardlib.plan import Plan
from shardlib.report.page import color_wanted
from shardlib.trainer import Trainer

SECONDS_BETWEEN_LINES = 10.0
NUM_BYTES = 256
EVAL_WINDOWS = 100  # not a multiple of common batch sizes: the last batch is short, and counted exactly
_SUMMARY = ("cut at", "balance", "ticks")  # of a pipeline; the plan has said the rest
MAX_EMULATED = 1024  # more threads than one process should start


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What all runs of one command share."""

    model: Loaded
    batch_spec: Any
    optimizer: optax.GradientTransformation
    corpus: ByteCorpus
    seed: int
    devices: str
    profile: Path | None = None
    eval_every: int | None = None

    def check(self) -> None:
        """Raises for a model or data that cannot be trained here, before any device is touched."""
        _check_reads_bytes(self.batch_spec)
        self.corpus.num_windows(self.batch_spec["inputs"].shape[1])

    def bind(self, plan: Plan) -> Bound:
        """The model under a plan; nothing is allocated, no device is touched."""
        bound = bind_model(self.model, plan=plan, batch_spec=self.batch_spec)
        _check_vocabulary(bound)
        return bound

    def train(self, bound: Bound, steps: int) -> Run:
        """Trains on the mesh of the plan, with progress on stderr."""
        for notice in bound.notices:
            note(f"notice: {notice}")
        batch, length = self.batch_spec["inputs"].shape
        mesh = _mesh(bound.plan.mesh, self.devices)
        _check_backend(mesh)
        corpus, held_out = self.corpus, None
        if self.eval_every is not None:
            corpus, held_out = self.corpus.split(length=length, held_out=EVAL_WINDOWS)
        batch_at = lambda step: corpus.batch(step, batch=batch, length=length, seed=self.seed)  # noqa: E731
        evaluation = None
        if held_out is not None and self.eval_every is not None:
            batches = lambda: held_out.in_order(batch=batch, length=length)  # noqa: E731
            evaluation = Evaluation(every=self.eval_every, batches=batches)
        with progress(f"{bound.plan.mesh}", steps) as on_step, user_code(f"MODEL {self.model.name!r}"):
            trainer = Trainer(bound, self.optimizer, mesh=mesh)
            try:
                return train(
                    trainer,
                    batch_at,
                    num_steps=steps,
                    seed=self.seed,
                    on_step=on_step,
                    profile=self.profile,
                    evaluation=evaluation,
                )
            except NonFiniteLoss as error:
                raise CheckFailed(f"{error}\n  fix: a smaller --lr, or look for what the loss divides by") from None

    def summary(self, bound: Bound, run: Run) -> dict[str, Any]:
        """The run as plain JSON values."""
        batch, length = self.batch_spec["inputs"].shape
        found = bound.explain(self.optimizer)
        staged = () if found.pipeline is None else pipeline_rows(found.pipeline)
        return {
            "model": self.model.name,
            "mesh": str(bound.plan.mesh),
            "devices": bound.plan.mesh.num_devices,
            "platform": run.platform,
            "num_parameters": found.num_parameters,
            "steps": len(run.losses),
            "losses": list(run.losses),
            "tokens_per_second": run.steps_per_second * batch * length,
            "compile_seconds": run.compile_seconds,
            "bytes_per_device": run.state_bytes_per_device,
            "temporary_bytes_per_device": run.temporary_bytes_per_device,
            "plan": [*bound.plan.choices, *(f"{name}: {text}" for name, text in staged if name in _SUMMARY)],
            **({"evaluations": [asdict(one) for one in run.evaluations]} if run.evaluations else {}),
        }


def corpus(paths: Sequence[Path] | None) -> ByteCorpus:
    """The text to train on."""
    return ByteCorpus(paths or None)


def reserve_devices(shape: MeshShape, devices: str) -> None:
    """Asks for emulated devices before any code of the user's runs: an array made there would fix their number.

    Starts no backend, and changes nothing where there are accelerators.
    """
    needed = shape.num_devices
    if needed > MAX_EMULATED and devices == "cpu":
        raise ShardingError(
            f"mesh {shape} needs {needed:,} devices, and at most {MAX_EMULATED} can be emulated here",
            fix="name a smaller mesh; shardlib explain takes one of any size",
        )
    if devices != "real" and needed <= MAX_EMULATED:
        with suppress(RuntimeError):  # the backend is up already; the mesh says so if it has too few
            jax.config.update("jax_num_cpu_devices", max(needed, jax.config.values["jax_num_cpu_devices"]))


def with_sizes(plan: Plan, devices: str) -> Plan:
    """The plan with a mesh without -1; that counts devices, so it starts the backend."""
    return plan if INFERRED not in plan.mesh.sizes else replace(plan, mesh=shape_of(_mesh(plan.mesh, devices)))


@functools.cache
def _check_backend(mesh: Mesh) -> None:
    """Self-tests: what partitioners have got wrong is right on this mesh, by this JAX."""
    check_joined_layouts(mesh)
    check_running_sums(mesh)


def _mesh(shape: MeshShape, devices: str) -> Mesh:
    try:
        return make_mesh(shape, devices=devices)
    except ShardingError as error:  # the library's argument is our option
        raise ShardingError(str(error).replace('devices "cpu"', "--devices cpu")) from None


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar with ETA and loss on a terminal; elsewhere a line at most every ten seconds. All of it on stderr."""
    console = Console(file=sys.stderr, no_color=not color_wanted(sys.stderr))
    if not console.is_terminal or console.is_dumb_terminal or not sys.stderr.isatty():
        yield _lines(title, steps)
        return
    columns = (
        TextColumn(f"{title} {{task.fields[loss]}}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(title, total=steps, loss="compiling")
        yield lambda done, loss: bar.update(task, completed=done, loss=f"loss {loss:.4f}")


def _lines(title: str, steps: int) -> Callable[[int, float], None]:
    last = [time.monotonic()]

    def on_step(done: int, loss: float) -> None:
        if time.monotonic() - last[0] >= SECONDS_BETWEEN_LINES:
            last[0] = time.monotonic()
            note(f"{title} step {done}/{steps} loss {loss:.4f}")

    return on_step


def _check_reads_bytes(batch_spec: Any) -> None:
    """The command line feeds bytes: token ids `inputs` and `targets`, [batch, length] int32, and nothing else."""
    found = {}
    if isinstance(batch_spec, dict):
        found = {str(name): f"{leaf.dtype}{list(leaf.axes)}" for name, leaf in batch_spec.items() if is_spec(leaf)}
    wanted = "int32['batch', 'length']"
    if found == {"inputs": wanted, "targets": wanted} and len({leaf.shape for leaf in batch_spec.values()}) == 1:
        return
    has = ", ".join(f"{name} {text}" for name, text in sorted(found.items())) or type(batch_spec).__name__
    raise ShardingError(
        f"train feeds text as int32 inputs and targets of axes (batch, length), and the batch spec has {has}",
        fix="give the model such a batch spec, or train it from Python with shardlib.Trainer",
    )


def _check_vocabulary(bound: Bound) -> None:
    for entry in bound.params.entries:
        for name, size in zip(entry.names, entry.shape, strict=True):
            if name == "vocab" and size < NUM_BYTES:
                raise ShardingError(
                    f"{entry.path} has a vocabulary of {size}, and bytes need {NUM_BYTES}: larger ids would be clipped",
                    fix=f"build the model with a vocabulary of at least {NUM_BYTES}",
                )
