"""Tensor parallelism: column- then row-split products, and the residual stream split along the sequence between them.

Heads and the MLP's hidden units are split, so that each pair of products needs one reduction. Between the pairs the
residual stream [batch, length, embed] is split along length: the norms' work and memory are shared too. KV heads
fewer than shards are replicated by rule; the attention op then copies each to the shards of its query group.

Source: Shoeybi et al. 2019 (1909.08053) section 3; Korthikanti et al. 2022 (2205.05198) section 4.2.
"""

from shardlib.rules import Rule
from shardlib.strategies.promise import Promise
from shardlib.strategies.strategy import Strategy

tensor = Strategy(
    axis="tensor",
    splits_batch=False,
    rules=(
        Rule.parse("vocab -> tensor"),
        Rule.parse("heads -> tensor"),
        Rule.parse("kv_heads -> tensor; indivisible=replicate"),
        Rule.parse("mlp -> tensor"),
        Rule.parse("stream -> tensor"),
        Rule.parse("length -> tensor; indivisible=replicate; beside=embed"),
    ),
    summary="heads, hidden units and vocabulary are split; the residual stream is split along the sequence",
    promises=(
        # Along the sequence: the stream is gathered before the column-split products, again for the gradients of
        # their weights, and its gradient before the row-split ones; each of the two leaves a part of a sum behind.
        Promise(kind="all-gather", tensors="column inputs", times="microbatch", count=2, along_length=True),
        Promise(kind="reduce-scatter", tensors="column inputs", times="microbatch", along_length=True),
        Promise(kind="reduce-scatter", tensors="row outputs", times="microbatch", along_length=True),
        Promise(kind="all-gather", tensors="row outputs", times="microbatch", along_length=True),
        Promise(kind="all-reduce", tensors="whole gradients", times="microbatch", along_length=True),
        Promise(kind="reduce-scatter", tensors="embeddings", times="microbatch", along_length=True),
        Promise(kind="all-gather", tensors="embeddings", times="microbatch", along_length=True),
        # The stream whole on every device: one sum each way.
        Promise(kind="all-reduce", tensors="row outputs", times="microbatch", along_length=False),
        Promise(kind="all-reduce", tensors="column inputs", times="microbatch", along_length=False),
        Promise(kind="all-reduce", tensors="embeddings", times="microbatch", along_length=False),
        # The largest logit, the sum of exponentials and the target's logit.
        Promise(kind="all-reduce", tensors="token statistics", times="microbatch", count=3),
    ),
)
