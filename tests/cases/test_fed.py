"""Field troubles, group FED: what goes into a step. Several processes are not there yet."""

import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.audit.hlo import parse
from tests.cases.test_rul import array, small_model


@pytest.mark.newest
def test_fed_01_the_batch_is_split_over_data_only():
    model, loss, _ = small_model()
    spec = {"x": array(8, 64, axes=("batch", None))}
    trainer = sl.Trainer(sl.bind(model, loss, sl.Plan(mesh="data=2,tensor=4"), spec), optax.sgd(0.1))
    assert trainer.bound.batch.specs == {"x": P("data", None)}
    assert trainer.batch_shardings["x"].shard_shape((8, 64)) == (4, 64)
    program = parse(trainer.compiled.as_text())
    gathered = [c for c in program.collectives if c.kind in ("all-gather", "all-to-all", "collective-permute")]
    assert gathered == []
    assert program.collectives, "gradients are reduced, so the program does communicate"


def test_fed_02_a_global_batch_that_the_processes_do_not_divide():
    """Ten rows over four processes of one device each: refused before anything is traced or fed."""

    def never(params, batch, rng):
        raise AssertionError("traced before the batch was checked")

    model, _, _ = small_model()
    with pytest.raises(sl.ShardingError) as caught:
        sl.bind(model, never, sl.Plan(mesh="data=4"), {"x": array(10, 64, axes=("batch", "embed"))})
    assert "x [10, 64] dim 0 'batch': size 10 not divisible by data=4" in str(caught.value)
