"""Field troubles, group FED: what goes into a step. Processes are counted here; none is started."""

import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.audit.hlo import parse
from shardlib.data.process_rows import process_rows
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


@pytest.mark.parametrize("process", range(4))
def test_fed_02_rows_of_a_process(process):
    with pytest.raises(sl.ShardingError) as caught:
        process_rows(batch=10, process=process, num_processes=4)
    assert str(caught.value) == (
        "a global batch of 10 rows is not divisible by 4 processes\n  fix: use a batch of 8 or 12 rows"
    )
    assert process_rows(batch=12, process=process, num_processes=4) == range(3 * process, 3 * process + 3)


def test_fed_02_every_row_is_fed_once():
    for num_processes in (1, 2, 4, 8):
        rows = [process_rows(batch=16, process=one, num_processes=num_processes) for one in range(num_processes)]
        assert [row for part in rows for row in part] == list(range(16))
    with pytest.raises(sl.ShardingError, match="process 4 is not one of 4"):
        process_rows(batch=16, process=4, num_processes=4)
    for batch in (0, 2):
        with pytest.raises(sl.ShardingError, match=f"batch of {batch} rows is not .*4 processes\n  fix: .* of 4 rows"):
            process_rows(batch=batch, process=0, num_processes=4)
