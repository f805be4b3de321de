"""Activations of a long train step over a context axis: no more than a device's share of what one device needs.

Programs are compiled for the CPU and not run. What the parameters need does not depend on the length, so that the
growth of temporaries from half the length to the whole is what activations need.
"""

import functools

import optax
import pytest

from models import llama
from shardlib import annotate
from shardlib.audit.memory import read_memory
from shardlib.binding import bind
from shardlib.ops.ring_attention import ring_attention
from shardlib.plan import Plan
from shardlib.trainer import Trainer

LENGTH = 32768
# Llama 3.1 8B, but for the number of layers and the vocabulary.
WIDTHS = {"layers": 2, "embed": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 4096, "remat": True}
TILES = annotate.Active(constrain=lambda x, names: x, ops={"attention": functools.partial(ring_attention, axis=None)})
"""One device computes its attention tile by tile, as the ring does: its reference would hold all scores at once."""


def temporaries(length, *, tiled=False, **plan):
    module, loss, spec = llama.tiny(batch=1, length=length, **WIDTHS)
    bound = bind(module, annotate.under(TILES, loss) if tiled else loss, Plan(**plan), spec)
    return read_memory(Trainer(bound, optax.sgd(0.1)).compiled).temp_bytes


def activations(**options):
    return temporaries(LENGTH, **options) - temporaries(LENGTH // 2, **options)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("optimized")
def test_activations_of_32k_tokens_are_divided():
    alone = activations(tiled=True, mesh="data=1")
    assert activations(mesh="context=4", attention="ring") <= 1.1 / 4 * alone
    # Negative control: half of the devices hold twice as much.
    assert activations(mesh="context=2", attention="ring") > 1.1 / 4 * alone
