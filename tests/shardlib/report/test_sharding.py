"""Pictures of shardings: blocks and coordinates, at any number of devices, and in a notebook."""

import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes import ShardingError, abstract_mesh, make_mesh
from shardlib.plan import Plan
from shardlib.report.sharding import sharding_picture


def test_cells_are_the_indices_that_devices_really_hold():
    mesh = make_mesh("data=2,tensor=4")
    picture = sharding_picture((16, 8), P("data", "tensor"), mesh)
    placed = jax.device_put(np.zeros((16, 8)), NamedSharding(mesh, P("data", "tensor")))
    assert picture.rows[0] == ("", "tensor=0", "tensor=1", "tensor=2", "tensor=3")
    for shard in placed.addressable_shards:
        (i, j) = (int(k[0]) for k in np.nonzero(mesh.devices == shard.device))
        (rows, columns) = shard.index
        assert picture.rows[i + 1][j + 1] == f"{rows.start}:{rows.stop}, {columns.start}:{columns.stop}"
        assert picture.rows[i + 1][0] == f"data={i}"
    assert "each device holds [8, 2]; 1 of 8 devices" in str(picture)


def test_replicated_and_one_way():
    assert sharding_picture((16,), P(), "data=8").rows == (("", ""), ("", "all"))
    one = sharding_picture((6, 16), P(None, ("data", "fsdp")), "data=2,fsdp=2,tensor=2")
    assert [row[1] for row in one.rows[1:]] == ["0:4", "4:8", "8:12", "12:16"]
    assert one.rows[2][0] == "data=0 fsdp=1"
    assert "2 of 8 devices hold each block" in one.footer


def test_16384_devices_in_half_a_second_and_in_a_notebook():
    mesh = abstract_mesh("data=16,fsdp=128,tensor=8")
    started = time.process_time()
    picture = sharding_picture((4096, 16384), P(("data", "fsdp"), "tensor"), mesh)
    page = picture._repr_html_()
    assert time.process_time() - started < 0.5
    assert "data=15 fsdp=127" in page
    assert page.count("<tr>") == 9
    assert "<pre>plan for mesh data=8" in Plan(mesh="data=8")._repr_html_()


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(ShardingError, match=r"dim 0 of .5, 4. is not divisible by data=2"):
        sharding_picture((5, 4), P("data"), "data=2")
    with pytest.raises(ShardingError, match="at most two split dims"):
        sharding_picture((4, 4, 4), P("data", "fsdp", "tensor"), "data=2,fsdp=2,tensor=2")
