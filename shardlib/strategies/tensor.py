"""Tensor parallelism: column- then row-split products, and the residual stream split along the sequence between them.

Heads and the MLP's hidden units are split, so that each pair of products needs one reduction. Between the pairs the
residual stream [batch, length, embed] is split along length: the norms' work and memory are shared too. KV heads
fewer than shards are replicated by rule; the attention op then copies each to the shards of its query group.

Source: Shoeybi et al. 2019 (1909.08053) section 3; Korthikanti et al. 2022 (2205.05198) section 4.2.
"""

from shardlib.rules import Rule
from shardlib.strategies.strategy import Strategy

tensor = Strategy(
    axis="tensor",
    splits_batch=False,
    rules=(
        Rule.parse("vocab -> tensor"),
        Rule.parse("heads -> tensor"),
        Rule.parse("kv_heads -> tensor; indivisible=replicate"),
        Rule.parse("mlp -> tensor"),
        Rule.parse("length -> tensor; indivisible=replicate; beside=embed"),
    ),
    summary="heads, hidden units and vocabulary are split; the residual stream is split along the sequence",
)
