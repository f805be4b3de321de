"""The optimizers that tests of optimizer state go over: everything optax builds, in sizes that suit small arrays."""

import jax
import optax
import optax.contrib


def matrices(params):
    """A mask of what has two dims or more, as people write it."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


ADAM = optax.adam(1e-2, eps=1e-3)
ALL = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": ADAM,
    "adamw": optax.adamw(1e-2, eps=1e-3, mask=matrices),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "adafactor_momentum": optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-2, eps=1e-3),
    "adagrad": optax.adagrad(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "adan": optax.adan(1e-2),
    "novograd": optax.novograd(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "sm3": optax.sm3(1e-2),
    "lbfgs": optax.scale_by_lbfgs(memory_size=3),
    "muon": optax.contrib.muon(1e-2),
    "schedule_free": optax.contrib.schedule_free(optax.adam(1e-2, b1=0.0, eps=1e-3), 1e-2),
    "schedule_free_sgd": optax.contrib.schedule_free_sgd(1e-2),
    "ademamix": optax.contrib.ademamix(1e-2),
    "prodigy": optax.contrib.prodigy(),
    "dog": optax.contrib.dog(1.0),
    "cocob": optax.contrib.cocob(),
    "mechanic": optax.contrib.mechanize(ADAM),
    "galore": optax.contrib.galore(1e-2, rank=2),
    "plateau": optax.chain(ADAM, optax.contrib.reduce_on_plateau()),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.clip(0.5), ADAM),
    "ema": optax.chain(ADAM, optax.ema(0.9)),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), matrices), ADAM),
    "nested_mask": optax.chain(optax.masked(optax.masked(ADAM, matrices), matrices), optax.scale(0.1)),
    "multi_transform": optax.multi_transform({"matrix": ADAM, "vector": optax.sgd(0.1, momentum=0.9)}, labels),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 0.0, 10), eps=1e-3
    ),
    "multisteps": optax.MultiSteps(ADAM, every_k_schedule=2),
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "named_chain": optax.named_chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", ADAM)),
    "multisteps_of_groups": optax.MultiSteps(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.multi_transform({"matrix": optax.contrib.muon(1e-2), "vector": optax.lion(1e-3)}, labels),
        ),
        every_k_schedule=2,
    ),
}
