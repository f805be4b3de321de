"""The training loop: a trainer over a stream of batches, every loss kept, a loss that is no number stops it.

In: a trainer, `step -> batch`, a number of steps. Out: a `Run` with losses and what it took.

    run = train(trainer, batch_at, num_steps=100, seed=0)
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardlib.trainer import Trainer


class NonFiniteLoss(ArithmeticError):
    """The loss of a step is NaN or infinite; the message names the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out batches, made anew each time, and after how many steps to evaluate on them."""

    every: int
    batches: Callable[[], Iterable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The exact mean loss over all held-out rows after some steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a training run did.

    Args:
        losses: one per step, exact means over each step's batch.
        platform: what the devices are: cpu, gpu or tpu.
        compile_seconds: wall time of the one compilation.
        steps_per_second: over all steps, without the compilation.
        state_bytes_per_device: bytes of parameters and optimizer state on the fullest device, measured.
        temporary_bytes_per_device: the compiled step's scratch memory.
        evaluations: what was evaluated, in order.
    """

    losses: tuple[float, ...]
    platform: str
    compile_seconds: float
    steps_per_second: float
    state_bytes_per_device: int
    temporary_bytes_per_device: int
    evaluations: tuple[Evaluated, ...] = ()


def train(
    trainer: Trainer,
    batch_at: Callable[[int], Any],
    *,
    num_steps: int,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
    profile: Path | None = None,
    evaluation: Evaluation | None = None,
) -> Run:
    """Trains for some steps from a fresh initialisation.

    Args:
        trainer: what runs the steps.
        batch_at: step number -> batch.
        num_steps: how many optimizer steps.
        seed: of the initial values and of the run's randomness.
        on_step: hears `(steps done, loss)` after each step.
        profile: a folder for a trace of the steps after the first (xprof, and Perfetto's JSON).
        evaluation: batches to evaluate on, and how often.

    Raises:
        NonFiniteLoss: a loss is NaN or infinite, with its step; the run stops there.
    """
    started = time.perf_counter()
    compiled = trainer.compiled
    compile_seconds = time.perf_counter() - started
    state = trainer.init(jax.random.key(seed))
    state_bytes = state_bytes_per_device(state)
    losses: list[float] = []
    evaluations: list[Evaluated] = []
    pending: Any = None
    started = time.perf_counter()
    for step in range(num_steps + 1):
        if profile is not None and step == min(1, num_steps - 1):
            jax.profiler.start_trace(str(profile), create_perfetto_trace=True)
        # The loss of the step before is read while this step runs, so that the devices never wait for the host.
        running = pending
        if step < num_steps:
            state, metrics = trainer.step(state, batch_at(step))
            pending = metrics["loss"]
            if evaluation is not None and (step + 1) % evaluation.every == 0:
                found = trainer.evaluate_all(state, evaluation.batches())
                evaluations.append(Evaluated(step=step + 1, loss=float(found["loss"])))
        if running is not None:
            losses.append(_finite(float(running), step))
            if on_step is not None:
                on_step(step, losses[-1])
    if profile is not None:
        jax.profiler.stop_trace()
    seconds = time.perf_counter() - started
    return Run(
        losses=tuple(losses),
        platform=trainer.mesh.devices.flat[0].platform,
        compile_seconds=compile_seconds,
        steps_per_second=num_steps / seconds,
        state_bytes_per_device=state_bytes,
        temporary_bytes_per_device=compiled.memory_analysis().temp_size_in_bytes,
        evaluations=tuple(evaluations),
    )


def state_bytes_per_device(state: Any) -> int:
    """Bytes of a tree of placed arrays on the device that holds most, counted from the shards themselves."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise NonFiniteLoss(
            f"the loss of step {step} is {loss} (steps count from 1); the parameters after it cannot be trusted"
        )
    return loss
