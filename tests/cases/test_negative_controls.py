"""What the checks of the groups NRM, RNG and SMG are worth: each fails when what it guards is broken on purpose."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from shardlib import accumulate, explicit
from shardlib.objective import Sums
from tests.cases.test_nrm import check_uneven
from tests.cases.test_rng import check_shards_draw_their_own
from tests.cases.test_smg import check_one_sum

EXPLICIT = {"mesh": "data=2", "lowering": "explicit"}


def caught(check, *, found, **plan):
    """The check fails, and on the value that the fault makes."""
    with pytest.raises(AssertionError, match=re.escape(found)):
        check(**plan)


def test_the_checks_pass_as_things_are():
    check_uneven(**EXPLICIT)
    check_one_sum(**EXPLICIT)
    check_shards_draw_their_own(mesh="data=8", lowering="explicit")


def test_a_mean_of_means_over_devices_is_caught(monkeypatch):
    """Each device divides by its own count, and the means are averaged."""

    monkeypatch.setattr(Sums, "summed", lambda sums, axes: dataclasses.replace(sums, weight=2 * sums.weight))
    caught(check_uneven, found="ACTUAL: array(2.", **EXPLICIT)


def test_a_mean_of_means_over_microbatches_is_caught(monkeypatch):
    """Each microbatch is scaled by its own count and by the number of microbatches."""
    forward = accumulate._forward

    def rescaled(*arguments, **options):
        pull, sums = forward(*arguments, **options)
        return lambda scales: pull((1 / (2 * sums.weight), scales[1])), sums

    monkeypatch.setattr(accumulate, "_forward", rescaled)
    caught(check_uneven, found="ACTUAL: array(2.", mesh="data=1", lowering="explicit", num_microbatches=2)


def test_a_dropped_sum_of_weights_is_caught(monkeypatch):
    monkeypatch.setattr(Sums, "summed", lambda sums, axes: sums)
    caught(check_uneven, found="ACTUAL: array(4.", **EXPLICIT)


def test_a_dropped_sum_of_gradients_is_caught(monkeypatch):
    monkeypatch.setattr(explicit, "reduce_leaf", lambda grad, spec, over, dtype: grad.astype(jnp.float32))
    caught(check_one_sum, found="(36.0, 252.0) == (168.0, 252.0)", **EXPLICIT)


def test_a_doubled_sum_of_gradients_is_caught(monkeypatch):
    reduce = explicit.reduce_leaf
    doubled = lambda grad, spec, over, dtype: jax.lax.psum(reduce(grad, spec, over=over, dtype=dtype), over)  # noqa: E731
    monkeypatch.setattr(explicit, "reduce_leaf", doubled)
    caught(check_one_sum, found="(336.0, 252.0) == (168.0, 252.0)", **EXPLICIT)


def test_a_mask_shared_by_all_shards_is_caught(monkeypatch):
    keys = explicit.part_keys
    monkeypatch.setattr(explicit, "part_keys", lambda rng, *, first, **sizes: keys(rng, first=0, **sizes))
    caught(check_shards_draw_their_own, found="assert 1 == 8", mesh="data=8", lowering="explicit")
