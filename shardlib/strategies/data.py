"""Data parallelism: the batch is split, parameters are whole on every device, gradients are summed.

ZeRO shards what is left of the redundancy: with `zero` of 1 or 2 each device reduces and updates its part of the
parameters, and gathers the rest.

Source: Rajbhandari et al. 2019 (1910.02054) sections 5 and 7.
"""

from shardlib.strategies.promise import Promise
from shardlib.strategies.strategy import Strategy

data = Strategy(
    axis="data",
    splits_batch=True,
    rules=(),
    summary="the batch is split; parameters are replicated and their gradients all-reduced",
    promises=(
        Promise(kind="all-reduce", tensors="sums", times="step", lowering="explicit"),
        Promise(kind="all-reduce", tensors="whole gradients", times="step", lowering="explicit"),
        Promise(kind="reduce-scatter", tensors="split gradients", times="step", lowering="explicit", zero=(1, 2, 3)),
        Promise(kind="all-gather", tensors="updated parameters", times="step", zero=(1, 2)),
        # zero=3: parameters are split by this axis as fsdp splits them.
        Promise(
            kind="all-gather", tensors="split parameters", times="step", lowering="explicit", gather="step", zero=(3,)
        ),
        Promise(
            kind="all-gather",
            tensors="split parameters",
            times="microbatch",
            lowering="explicit",
            gather="microbatch",
            zero=(3,),
        ),
        Promise(kind="all-reduce", tensors="sums", times="microbatch", lowering="automatic"),
        Promise(kind="all-reduce", tensors="whole gradients", times="microbatch", lowering="automatic"),
        Promise(
            kind="reduce-scatter", tensors="split gradients", times="microbatch", lowering="automatic", zero=(1, 2, 3)
        ),
        Promise(
            kind="all-gather",
            tensors="split parameters",
            times="microbatch",
            count=2,
            lowering="automatic",
            zero=(3,),
        ),
    ),
)
