"""Field troubles, group MSH: mesh and device order."""

import numpy as np
import pytest

from meshes import ShardingError, make_mesh
from tests.meshes.test_build import fake_slices


def test_msh_01_slow_link_axis(monkeypatch):
    grids = []
    monkeypatch.setattr("meshes.build.Mesh", lambda grid, names, axis_types: grids.append(grid))
    make_mesh("data=2,tensor=4", devices=fake_slices(4, 4))
    slices = np.vectorize(lambda device: device.slice_index)(grids[0])
    assert slices.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]  # a tensor group never crosses slices
    with pytest.raises(ShardingError) as caught:
        make_mesh("tensor=8", devices=fake_slices(4, 4))
    assert "'tensor'" in str(caught.value)
    assert "slow network" in str(caught.value)
