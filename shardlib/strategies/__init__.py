"""Strategies: the default meaning of every mesh axis, and the rules they make together."""

from shardlib.rules import Rule, Rules
from shardlib.strategies.data import data
from shardlib.strategies.fsdp import fsdp
from shardlib.strategies.strategy import Strategy
from shardlib.strategies.tensor import tensor

ALL = (data, fsdp, tensor)

# Dims that no strategy splits; `length` is here for arrays without an embed dim, such as token ids.
_WHOLE = ("length", "head_dim", "position", "layers")

__all__ = ["ALL", "Strategy", "default_rules"]


def default_rules() -> Rules:
    """The rules of all strategies, good for any mesh made of their axes: rules for absent axes do not fire."""
    batch = Rule(logical="batch", mesh_axes=tuple(strategy.axis for strategy in ALL if strategy.splits_batch))
    own = [rule for strategy in ALL for rule in strategy.rules]
    whole = [Rule(logical=name, mesh_axes=()) for name in _WHOLE]
    return Rules(rules=(batch, *own, *whole))
