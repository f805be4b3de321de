"""Pipeline schedules as values: tables, their proofs, simulation, lowering, synthesis. Imports no JAX."""

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
    "Placement",
    "ShardingError",
    "Simulation",
    "Synthesis",
    "Table",
    "build",
    "compare",
    "lower",
    "simulate",
    "synthesize",
    "verify",
]
