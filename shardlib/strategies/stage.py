"""Pipeline parallelism: consecutive layers on different devices, microbatches passed from stage to stage.

Every stage keeps the parameters of its own layers. The other parameters are stored in parts over the stages, gathered
once per step, and their gradients scattered the same way; where the data-like axes split them too, both go together.
Activations travel forwards and their cotangents backwards, one message per microbatch and boundary. Inputs that the
first or the last stage alone reads are held in parts over all stages where that saves memory. It has no rules:
`staging.place_on_stages` places the layers, wherever the other rules have put their dims.

Source: Huang et al. 2019 (1811.06965) section 2 (microbatches, stages); Narayanan et al. 2021 (2104.04473) section 2.2
(1F1B, interleaved stages).
"""

from shardlib.strategies.promise import Promise
from shardlib.strategies.strategy import Strategy

stage = Strategy(
    axis="stage",
    splits_batch=False,
    rules=(),
    summary="layers are split into stages, and microbatches pass through them; other parameters are stored in parts",
    promises=(
        Promise(kind="collective-permute", tensors="activations", times="microbatch", lowering="explicit"),
        Promise(kind="collective-permute", tensors="cotangents", times="microbatch", lowering="explicit"),
        Promise(kind="collective-permute", tensors="inputs", times="microbatch", lowering="explicit"),
        Promise(kind="all-reduce", tensors="sums", times="step", lowering="explicit"),
        Promise(kind="all-gather", tensors="split parameters", times="step", lowering="explicit"),
        Promise(kind="reduce-scatter", tensors="split gradients", times="step", lowering="explicit"),
        Promise(kind="all-reduce", tensors="whole gradients", times="step", lowering="explicit"),
        # A vocabulary that is spread over the stages: rows found, messages shown to all, statistics, their gradients.
        Promise(kind="all-reduce", tensors="spread vocabulary", times="microbatch", lowering="explicit"),
        # Layers that the model holds one by one: each is stored in parts over all stages, and goes to its own.
        Promise(kind="all-to-all", tensors="single layers", times="step", lowering="explicit"),
        Promise(kind="all-to-all", tensors="gradients of single layers", times="step", lowering="explicit"),
    ),
)
