"""Fully sharded data parallelism: the batch is split, and so is every parameter, along its embed dim.

Source: ZeRO stage 3, Rajbhandari et al. 2019 (1910.02054) section 5.
"""

from shardlib.rules import Rule
from shardlib.strategies.promise import Promise
from shardlib.strategies.strategy import Strategy

fsdp = Strategy(
    axis="fsdp",
    splits_batch=True,
    rules=(Rule.parse("embed -> fsdp"),),
    summary="the batch is split; parameters are sharded along embed and gathered where they are used",
    promises=(
        Promise(kind="all-reduce", tensors="sums", times="step", lowering="explicit"),
        Promise(kind="all-gather", tensors="split parameters", times="step", lowering="explicit", gather="step"),
        Promise(
            kind="all-gather", tensors="split parameters", times="microbatch", lowering="explicit", gather="microbatch"
        ),
        Promise(kind="reduce-scatter", tensors="split gradients", times="step", lowering="explicit"),
        Promise(kind="all-reduce", tensors="whole gradients", times="step", lowering="explicit"),
        Promise(kind="all-reduce", tensors="sums", times="microbatch", lowering="automatic"),
        # Forward and backward.
        Promise(kind="all-gather", tensors="split parameters", times="microbatch", count=2, lowering="automatic"),
        Promise(kind="reduce-scatter", tensors="split gradients", times="microbatch", lowering="automatic"),
        Promise(kind="all-reduce", tensors="whole gradients", times="microbatch", lowering="automatic"),
    ),
)
