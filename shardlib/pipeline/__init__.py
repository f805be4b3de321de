"""Pipeline schedules as values: tables, their proofs, simulation, lowering, synthesis; and the transform.

Importing this imports no JAX; what needs it loads on first use (PEP 562).
"""

import importlib
from typing import Any

from meshes.errors import ShardingError
from shardlib.pipeline.compare import Comparison, compare
from shardlib.pipeline.costs import Costs
from shardlib.pipeline.lower import lower
from shardlib.pipeline.lowered import Lowered
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules import ALL, build
from shardlib.pipeline.simulate import Simulation, simulate
from shardlib.pipeline.synthesize import Synthesis, synthesize
from shardlib.pipeline.table import Action, Table
from shardlib.pipeline.verify import Bounds, verify

__all__ = [
    "ALL",
    "Action",
    "Bounds",
    "Comparison",
    "Costs",
    "Lowered",
    "Parts",
    "Placement",
    "ShardingError",
    "Simulation",
    "Stacked",
    "Synthesis",
    "Table",
    "build",
    "check_no_divergence",
    "compare",
    "cut",
    "lower",
    "simulate",
    "synthesize",
    "value_and_grad",
    "verify",
]


_LAZY = {
    "cut": "shardlib.pipeline.cutting",
    "Parts": "shardlib.pipeline.parts",
    "Stacked": "shardlib.pipeline.stack",
    "check_no_divergence": "shardlib.audit.divergence",
    "value_and_grad": "shardlib.value_and_grad",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'shardlib.pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
