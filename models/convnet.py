"""A small residual convolutional network with BatchNorm in linen, for images of 32 x 32 x 3 in 10 classes.

In: images [batch, height, width, channel]. Out: logits [batch, classes], and running statistics of the whole batch.

    module, loss, batch_spec = small()
    loss(params, batch, key, collections).state     # updated; with key None they are used, and returned as they are

Source: He et al. 2015 (1512.03385) section 4.2; shortcuts without parameters (option A).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardlib import annotate
from shardlib.batch_spec import ArraySpec
from shardlib.loss import Loss, Mean

KERNEL = nn.initializers.he_normal()
MATRIX = nn.initializers.lecun_normal()
ZEROS = nn.initializers.zeros
ONES = nn.initializers.ones

# (module, loss, batch_spec), the loss taking and returning collections.
Example = tuple[nn.Module, Callable[[Any, Mapping[str, Any], Any, Any], Loss], dict[str, ArraySpec]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes and options of a convolutional network; a static value.

    Args:
        widths: channels of the residual stream in each stage; each stage after the first halves height and width.
        blocks: residual blocks per stage.
        size, channel, classes: of the images, square, and of the labels.
        momentum: what running statistics keep of themselves in each step.
        dtype: of the computation; None follows the parameters. Statistics and the loss are float32 either way.
    """

    widths: tuple[int, ...]
    blocks: int
    size: int
    channel: int
    classes: int
    momentum: float = 0.9
    dtype: Any = None


class Block(nn.Module):
    """Two convolutions around hidden channels, like the two products of an MLP: split over tensor, one sum at the end.

    The residual stream's channels are named "embed", so that fsdp splits every kernel along them; the hidden channels
    are named "mlp".
    """

    config: Config
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None, *, train: bool) -> jax.Array:
        """[batch, height, width, embed] to [batch, height / stride, width / stride, self.width]."""
        normalise = functools.partial(norm, self.config, train=train)
        y = conv(self.config, self.width, "embed", "mlp", stride=self.stride, name="up")(x)
        y = nn.relu(normalise("mlp", name="up_norm")(y, mask=mask))
        y = annotate.constrain(y, "batch", "height", "width", "mlp")
        y = conv(self.config, self.width, "mlp", "embed", name="down")(y)
        y = normalise("embed", name="down_norm")(y, mask=mask)
        more = self.width - x.shape[-1]
        x = jnp.pad(x[:, :: self.stride, :: self.stride], ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2)))
        return annotate.constrain(nn.relu(x + y), "batch", "height", "width", "embed")


class ConvNet(nn.Module):
    """The whole model; "batch_stats" are the running statistics."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, mask: jax.Array | None = None, *, train: bool = False) -> jax.Array:
        """Images [batch, height, width, channel] to logits [batch, classes].

        Args:
            mask: [batch, 1, 1, 1], True for the rows that count in the statistics; None for all.
            train: normalise by the statistics of the batch, over all devices, and update the running ones.
        """
        c = self.config
        x = conv(c, c.widths[0], "channel", "embed", name="stem")(images)
        x = nn.relu(norm(c, "embed", train=train, name="norm")(x, mask=mask))
        x = annotate.constrain(x, "batch", "height", "width", "embed")
        for stage, width in enumerate(c.widths):
            for index in range(c.blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = Block(c, width, stride, name=f"stage{stage}_block{index}")(x, mask, train=train)
        x = annotate.constrain(x.mean(axis=(1, 2)), "batch", "embed")
        head = annotate.logical(MATRIX, "embed", "classes")
        bias = annotate.logical(ZEROS, "classes")
        return nn.Dense(c.classes, dtype=c.dtype, kernel_init=head, bias_init=bias, name="head")(x)


def conv(config: Config, width: int, inside: str, outside: str, *, stride: int = 1, name: str) -> nn.Conv:
    """A 3 x 3 convolution without bias from channels named `inside` to channels named `outside`."""
    kernel_init = annotate.logical(KERNEL, None, None, inside, outside)
    return nn.Conv(
        width, (3, 3), strides=stride, use_bias=False, dtype=config.dtype, kernel_init=kernel_init, name=name
    )


def norm(config: Config, axis: str, *, train: bool, name: str) -> nn.BatchNorm:
    """A batch normalisation of channels named `axis`; its statistics are float32."""
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=config.momentum,
        dtype=config.dtype,
        scale_init=annotate.logical(ONES, axis),
        bias_init=annotate.logical(ZEROS, axis),
        name=name,
    )


def class_loss(logits: jax.Array, batch: Mapping[str, Any], *, state: Any) -> Loss:
    """Cross entropy summed over rows, in float32, with aux "accuracy".

    Args:
        logits: [batch, classes], floating.
        batch: "labels" [batch] integer, and optionally "weights" [batch], 0 for a masked row.
        state: what the next step starts from.
    """
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    is_label = jax.lax.broadcasted_iota(batch["labels"].dtype, logits.shape, 1) == batch["labels"][:, None]
    nll = -jnp.where(is_label, log_probabilities, 0.0).sum(axis=-1)
    hits = (jnp.argmax(logits, axis=-1) == batch["labels"]).astype(jnp.float32)
    weights = batch.get("weights")
    weights = jnp.ones_like(nll) if weights is None else weights.astype(jnp.float32)
    weight = weights.sum()
    accuracy = Mean((hits * weights).sum(), weight)
    return Loss(total=(nll * weights).sum(), weight=weight, aux={"accuracy": accuracy}, state=state)


def build(config: Config, *, batch: int = 16, weights: bool = False) -> Example:
    """The model, its loss and its batch; allocates nothing.

    Args:
        config: sizes.
        batch: rows.
        weights: the batch spec has "weights" [batch]: rows of weight 0 count neither in the loss nor in statistics.
    """
    module = ConvNet(config)

    def loss(params: Any, batch: Mapping[str, Any], rng: jax.Array | None, collections: Any) -> Loss:
        # An evaluation gives no key: running statistics are used, and stay as they are.
        images = batch["images"].astype(config.dtype or jnp.result_type(*jax.tree.leaves(params)))
        variables = {"params": params, **collections}
        if rng is None:
            logits: Any = module.apply(variables, images)
            return class_loss(logits, batch, state=collections)
        real = batch["weights"] > 0 if "weights" in batch else None
        mask = None if real is None else (real | ~real.any())[:, None, None, None]
        logits, updated = module.apply(variables, images, mask, train=True, mutable=list(collections))
        if real is not None:  # a batch without a real row has no statistics: those of its padding are not kept
            updated = jax.tree.map(lambda new, old: jnp.where(real.any(), new, old), updated, collections)
        return class_loss(logits, batch, state=updated)

    return module, loss, batch_spec(config, batch=batch, weights=weights)


def batch_spec(config: Config, *, batch: int, weights: bool = False) -> dict[str, ArraySpec]:
    """The spec of `{"images", "labels"}`, and of "weights" when asked."""
    shape = (batch, config.size, config.size, config.channel)
    spec = {
        "images": ArraySpec(shape=shape, dtype="float32", axes=("batch", "height", "width", "channel")),
        "labels": ArraySpec(shape=(batch,), dtype="int32", axes=("batch",)),
    }
    if weights:
        spec["weights"] = ArraySpec(shape=(batch,), dtype="float32", axes=("batch",))
    return spec


def small(*, batch: int = 16, weights: bool = False, **overrides: Any) -> Example:
    """A ResNet-8 for CIFAR-10 of 0.08M parameters; `overrides` are fields of `Config`."""
    sizes: dict[str, Any] = {"widths": (16, 32, 64), "blocks": 1, "size": 32, "channel": 3, "classes": 10}
    return build(Config(**(sizes | overrides)), batch=batch, weights=weights)
