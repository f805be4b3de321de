"""Replicas across the slow network: whole copies of a sharded model, gradients summed across them once a step.

With fsdp inside a slice and replica across slices (hybrid sharding), gradients are reduce-scattered within the slice
first, so that only a shard of them crosses.

Source: Zhao et al. 2023 (2304.11277) section 3.2.2, hybrid sharding.
"""

from shardlib.strategies.promise import Promise
from shardlib.strategies.strategy import Strategy

replica = Strategy(
    axis="replica",
    splits_batch=True,
    rules=(),
    summary="the batch is split across slices; each slice holds a whole copy, and shards of gradients cross once",
    promises=(
        Promise(kind="all-reduce", tensors="sums", times="step", lowering="explicit"),
        Promise(kind="all-reduce", tensors="whole gradients", times="step", lowering="explicit", alone=True),
        Promise(kind="all-reduce", tensors="sums", times="microbatch", lowering="automatic"),
        Promise(kind="all-reduce", tensors="whole gradients", times="microbatch", lowering="automatic", alone=True),
    ),
)
