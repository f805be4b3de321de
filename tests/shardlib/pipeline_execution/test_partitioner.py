"""Gathers from arrays split over an automatic axis, within the ticks: other programs abort in XLA's partitioner.

A loss of integer labels over logits whose vocabulary is split, and an embedding whose vocabulary is split, on meshes
with a further automatic axis of size > 1 beside it or without. In child processes, for an abort ends a process: one for
the commonest meshes, and in the exhaustive tier one for every combination of axes.
"""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_disable_most_optimizations", True)

import flax.linen as nn
import optax

import shardlib as sl
from models import language
from shardlib import annotate
from shardlib.rules import Rules
from shardlib.strategies import default_rules
from tests.shardlib.pipeline_execution import reference, towers


class Gathering(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        table = annotate.logical(nn.initializers.normal(0.5), "vocab", "embed")
        embed = nn.Embed(towers.VOCAB, towers.EMBED, embedding_init=table)
        stack = nn.scan(
            towers.Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=4,
            metadata_params={nn.PARTITION_NAME: annotate.LAYERS},
        )
        x = embed(inputs)
        x, _ = stack(0.0)(x, (inputs > 2)[..., None].astype(x.dtype))
        head = annotate.logical(nn.initializers.lecun_normal(), "embed", "vocab")
        logits = nn.Dense(towers.VOCAB, use_bias=False, kernel_init=head)(x)
        return annotate.constrain(logits, "batch", "length", "vocab")


def loss(params, batch, rng):
    logits = Gathering().apply({"params": params}, batch["inputs"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return sl.Loss(total=nll.sum(), weight=float(nll.size))


example = (Gathering(), loss, language.batch_spec(batch=16, length=towers.LENGTH))
sgd = optax.sgd(0.1)
wanted = reference.one_device(example, sgd, num_steps=1)
rules = default_rules().with_first(Rules.parse(["mlp -> other"]))
for mesh in MESHES:
    # Beside a second axis of the compiler's the operands are gathered, with moves that branches must not hold.
    plan = {"mesh": mesh, "rules": rules, "idle": "mask"} if "other" in mesh else {"mesh": mesh}
    found = reference.pipelined(example, sgd, num_steps=1, num_microbatches=2, **plan)
    reference.assert_equal(found, wanted)
    print("equal on", mesh, flush=True)
"""
MESHES = ("stage=2,tensor=2", "stage=2,data=2,tensor=2", "stage=2,fsdp=2,tensor=2", "stage=2,tensor=2,other=2")


def run(meshes):
    program = textwrap.dedent(PROGRAM).replace("MESHES", repr(meshes))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)


@pytest.mark.newest
def test_gathers_over_a_split_vocabulary_do_not_abort():
    done = run(MESHES)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"equal on {mesh}" for mesh in MESHES]


COMBINATIONS = (
    *("stage=2,replica=2,tensor=2", "stage=2,data=2,fsdp=2", "stage=2,replica=2,fsdp=2", "stage=4,tensor=2"),
    *("stage=2,tensor=4", "stage=2,data=2,other=2", "stage=2,fsdp=2,other=2", "stage=4,data=2", "stage=4,fsdp=2"),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [*MESHES, *COMBINATIONS])
def test_no_combination_of_axes_aborts(mesh):
    done = run((mesh,))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"equal on {mesh}"]
