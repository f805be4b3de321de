"""The half of the pipeline that needs no model imports no JAX; scipy only where it is asked for."""

import subprocess
import sys

import pytest

MODULES = [
    "compare",
    "costs",
    "graph",
    "lower",
    "lowered",
    "placement",
    "prove",
    "retime",
    "schedules",
    "search",
    "simulate",
    "slots",
    "synthesize",
    "table",
    "ticks",
    "verify",
]


@pytest.mark.parametrize("package", ["shardlib.pipeline", "shardlib.report"])
def test_no_jax(package):
    modules = {
        "shardlib.pipeline": [f"shardlib.pipeline.{name}" for name in MODULES],
        "shardlib.report": [
            f"shardlib.report.{name}"
            for name in [
                "chrome_trace",
                "gantt",
                "schedule_colors",
                "schedule_grid",
                "schedule_page",
                "schedule_summary",
                "schedule_terminal",
            ]
        ],
    }[package]
    code = (
        f"import {', '.join(modules)}, sys; print([m for m in ('jax', 'flax', 'optax', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
