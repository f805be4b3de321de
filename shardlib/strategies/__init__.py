"""Strategies: the default meaning of every mesh axis, and the rules they make together."""

from shardlib.rules import Rule, Rules
from shardlib.strategies.context import context
from shardlib.strategies.data import data
from shardlib.strategies.fsdp import fsdp
from shardlib.strategies.replica import replica
from shardlib.strategies.stage import stage
from shardlib.strategies.strategy import Strategy
from shardlib.strategies.tensor import tensor

ALL = (replica, data, fsdp, stage, context, tensor)

DATA_LIKE = tuple(strategy.axis for strategy in ALL if strategy.splits_batch)
"""Mesh axes that take a share of the batch; two lowerings exist for them, automatic and explicit."""

# Dims that no strategy splits; `length` is here for arrays without an embed dim, such as token ids.
_WHOLE = ("length", "head_dim", "position", "layers", "lora_rank", "height", "width", "channel", "classes")

__all__ = ["ALL", "DATA_LIKE", "Strategy", "default_rules"]


def default_rules() -> Rules:
    """The rules of all strategies, good for any mesh made of their axes: rules for absent axes do not fire."""
    batch = Rule(logical="batch", mesh_axes=DATA_LIKE)
    own = [rule for strategy in ALL for rule in strategy.rules]
    whole = [Rule(logical=name, mesh_axes=()) for name in _WHOLE]
    return Rules(rules=(batch, *own, *whole))
