"""Pipeline schedules as values: tables, their proofs, simulation and lowering. Imports no JAX."""

from shardlib.pipeline.costs import Costs
from shardlib.pipeline.placement import Placement
from shardlib.pipeline.schedules import ALL, build
from shardlib.pipeline.simulate import Simulation, simulate
from shardlib.pipeline.table import Action, Table
from shardlib.pipeline.verify import Bounds, verify

__all__ = ["ALL", "Action", "Bounds", "Costs", "Placement", "Simulation", "Table", "build", "simulate", "verify"]
