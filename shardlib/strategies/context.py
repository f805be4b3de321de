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
    # How attention runs is chosen for each model (`context.choose_context`).
    promises=(
        Promise(kind="all-reduce", tensors="whole gradients", times="microbatch"),
        Promise(kind="collective-permute", tensors="keys and values", times="microbatch", attention="ring"),
        Promise(
            kind="collective-permute", tensors="gradients of keys and values", times="microbatch", attention="ring"
        ),
        Promise(kind="all-gather", tensors="keys and values", times="microbatch", attention="gather"),
        Promise(kind="reduce-scatter", tensors="gradients of keys and values", times="microbatch", attention="gather"),
        Promise(kind="all-to-all", tensors="heads", times="microbatch", attention="all_to_all"),
        *(
            Promise(kind="all-gather", tensors="token labels", times="microbatch", attention=kind)
            for kind in ("ring", "gather", "all_to_all")
        ),
    ),
)
