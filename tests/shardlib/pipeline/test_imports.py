"""The half of the pipeline that needs no model imports no JAX; scipy only where it is asked for."""

import pkgutil
import subprocess
import sys

import pytest

import shardlib.pipeline
import shardlib.pipeline.schedules

PICTURES = (
    "shardlib.report.chrome_trace",
    "shardlib.report.gantt",
    "shardlib.report.schedule_colors",
    "shardlib.report.schedule_grid",
    "shardlib.report.schedule_page",
    "shardlib.report.schedule_summary",
    "shardlib.report.schedule_terminal",
)
SCHEDULES = tuple(
    f"shardlib.pipeline.schedules.{module.name}"
    for module in pkgutil.iter_modules(shardlib.pipeline.schedules.__path__)
)
PIPELINE = tuple(
    f"shardlib.pipeline.{name}"
    for name in (
        *("candidates", "compare", "costs", "graph", "integer_program", "lower", "lowered", "placement", "prove"),
        *("retime", "search", "simulate", "slots", "synthesize", "table", "ticks", "verify"),
    )
)


@pytest.mark.parametrize("modules", [PIPELINE, SCHEDULES, PICTURES], ids=["pipeline", "schedules", "pictures"])
def test_no_jax(modules):
    code = (
        f"import {', '.join(modules)}, sys; print([m for m in ('jax', 'flax', 'optax', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
