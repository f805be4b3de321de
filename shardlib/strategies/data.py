"""Data parallelism: the batch is split, parameters are whole on every device, gradients are summed."""

from shardlib.strategies.strategy import Strategy

data = Strategy(
    axis="data",
    splits_batch=True,
    rules=(),
    summary="the batch is split; parameters are replicated and their gradients all-reduced",
)
