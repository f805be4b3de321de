"""Fully sharded data parallelism: the batch is split, and so is every parameter, along its embed dim.

Source: ZeRO stage 3, Rajbhandari et al. 2019 (1910.02054) section 5.
"""

from shardlib.rules import Rule
from shardlib.strategies.strategy import Strategy

fsdp = Strategy(
    axis="fsdp",
    splits_batch=True,
    rules=(Rule.parse("embed -> fsdp"),),
    summary="the batch is split; parameters are sharded along embed and gathered where they are used",
)
