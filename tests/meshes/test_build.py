"""Meshes over devices: emulated, given, abstract; axis types, topology order, and too few devices."""

import subprocess
import sys
from dataclasses import dataclass

import jax
import pytest
from jax.sharding import AxisType

from meshes import MeshShape, ShardingError, abstract_mesh, make_mesh, shape_of


@dataclass(frozen=True)
class FakeDevice:
    """What a mesh reads of a device: enough to arrange it."""

    id: int
    slice_index: int = 0
    platform: str = "cpu"
    process_index: int = 0


def run_python(code: str) -> subprocess.CompletedProcess:
    """A fresh interpreter, whose JAX is not up yet."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.newest
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_has_the_named_axes_in_order(axis_type):
    mesh = make_mesh("data=2,fsdp=2,tensor=2", axis_type=axis_type)
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.shape == (2, 2, 2)
    assert set(mesh.axis_types) == {axis_type}
    assert list(mesh.devices.flat) == jax.devices()[:8]
    assert shape_of(mesh) == MeshShape.parse("data=2,fsdp=2,tensor=2")


def test_the_left_over_axis_takes_the_devices_there_are():
    assert shape_of(make_mesh("data=-1,tensor=2")) == MeshShape.parse("data=4,tensor=2")
    assert shape_of(make_mesh("data=-1", devices=jax.devices()[:3])) == MeshShape.parse("data=3")


def test_fewer_devices_than_there_are_is_fine():
    assert make_mesh("data=2").devices.size == 2
    assert make_mesh({"data": 1}, devices="cpu").devices.size == 1


def test_too_few_devices_given():
    with pytest.raises(ShardingError, match="mesh data=4 needs 4 devices and 3 were given"):
        make_mesh("data=4", devices=jax.devices()[:3])


def test_too_few_devices_once_jax_is_running():
    with pytest.raises(ShardingError) as caught:
        make_mesh("data=16")
    text = str(caught.value)
    assert "the mesh needs 16 devices and there are 8 (cpu)" in text
    assert "JAX was already running" in text
    assert 'jax.config.update("jax_num_cpu_devices", 16)' in text


def test_no_accelerator_and_unknown_kinds():
    with pytest.raises(ShardingError, match='no accelerator: JAX found only the CPU\n  fix: use devices "cpu"'):
        make_mesh("data=2", devices="real")
    with pytest.raises(ShardingError, match=r"devices 'cpuu' are unknown \(did you mean 'cpu'\?\)"):
        make_mesh("data=2", devices="cpuu")


def test_a_fresh_process_emulates_as_many_devices_as_the_mesh_needs():
    code = "import meshes; print(meshes.make_mesh('data=3,tensor=4').devices.shape)"
    done = run_python(code)
    assert done.stdout == "(3, 4)\n", done.stderr


def test_a_process_whose_backend_is_up_with_one_device_hears_what_to_do():
    code = (
        "import jax; jax.devices()\n"
        "import meshes\n"
        "try: meshes.make_mesh('data=4')\n"
        "except meshes.ShardingError as error: print(error)"
    )
    done = run_python(code)
    assert "the mesh needs 4 devices and there are 1 (cpu): JAX was already running" in done.stdout, done.stderr
    assert 'put first jax.config.update("jax_num_cpu_devices", 4)' in done.stdout


def test_devices_counted_by_xla_flags_are_enough():
    code = (
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n"
        "import meshes; print(meshes.make_mesh('data=8').devices.shape)"
    )
    done = run_python(code)
    assert done.stdout == "(8,)\n", done.stderr


@pytest.mark.newest
def test_an_abstract_mesh_of_any_size_needs_no_device():
    mesh = abstract_mesh("data=16,fsdp=128,tensor=8")
    assert mesh.size == 16384
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert shape_of(mesh).size("fsdp") == 128
    with pytest.raises(ShardingError, match="-1 needs devices to count"):
        abstract_mesh("data=-1")


def fake_slices(*counts: int) -> list[FakeDevice]:
    indices = [index for index, count in enumerate(counts) for _ in range(count)]
    return [FakeDevice(id=i, slice_index=index) for i, index in enumerate(indices)]


@pytest.mark.parametrize("text", ["replica=2,data=4", "data=8", "replica=2,data=2,tensor=2"])
def test_slices_lie_along_the_outermost_axes(monkeypatch, text):
    grids = []
    monkeypatch.setattr("meshes.build.Mesh", lambda grid, names, axis_types: grids.append(grid))
    if text == "data=8":
        # One axis inside and across slices: its collectives would run over the slow network.
        with pytest.raises(ShardingError, match="puts axis 'data' inside and across slices"):
            make_mesh(text, devices=fake_slices(4, 4))
        return
    make_mesh(text, devices=fake_slices(4, 4))
    inner = grids[0].reshape(2, -1)
    assert [{device.slice_index for device in row} for row in inner] == [{0}, {1}]


def test_slices_of_different_sizes_are_refused():
    with pytest.raises(ShardingError, match=r"slices hold different numbers of devices \[3, 5\]"):
        make_mesh("replica=2,data=4", devices=fake_slices(3, 5))
