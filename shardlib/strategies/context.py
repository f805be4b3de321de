"""Context parallelism: the sequence is divided, attention moves keys and values (or heads) between its parts.

Every activation with a length dim is divided; parameters are not, and their gradients are summed over the axis. Which
attention runs, and in which order devices hold the tokens, is chosen per model from what each kind sends.

Source: Liu et al. 2023 (2310.01889) section 3; Jacobs et al. 2023 (2309.14509) section 3.
"""

from shardlib.rules import Rule
from shardlib.strategies.promise import Promise
from shardlib.strategies.strategy import Strategy

context = Strategy(
    axis="context",
    splits_batch=False,
    rules=(
        # Between products of a tensor axis the residual stream is divided over both.
        Rule.parse("length -> context+tensor; indivisible=next; beside=embed"),
        Rule.parse("length -> context"),
    ),
    summary="sequences are divided along their length; attention exchanges keys and values, or heads",
    # What attention sends depends on its kind, which a model's trace decides: `ops.context_choice` has those bytes.
    promises=(Promise(kind="all-reduce", tensors="whole gradients", times="microbatch"),),
)
