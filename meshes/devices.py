"""Devices for a mesh: real ones, emulated CPU devices, or those of a described TPU. The only caller of `jax.devices()`.

In: how many are needed and of which kind, or the name of a topology. Out: JAX devices, or an error that says how to
get them.

    find(8, kind="cpu")         # eight emulated CPU devices in this process
    compile_only("v5p:4x4x4")   # 64 devices that programs can be compiled for, and not run on
"""

import importlib.util
import os
from typing import Any, Literal, get_args

import jax
from jax.experimental import topologies

from meshes.errors import ShardingError, nearest

Kind = Literal["auto", "real", "cpu"]


def find(num_devices: int | None, *, kind: str = "auto") -> list[Any]:
    """Returns the first `num_devices` devices of the kind, starting the JAX backend if it is not up.

    Args:
        num_devices: how many, or None for all there are.
        kind: `"cpu"` emulates as many as needed; `"real"` takes accelerators only; `"auto"` takes the default
            backend's devices, emulating when that backend is the CPU.

    Raises:
        ShardingError: fewer devices than needed, or the CPU backend is already up with too few.
    """
    if kind not in get_args(Kind):
        raise ShardingError(f"devices {kind!r} are unknown{nearest(kind, get_args(Kind))}", fix="use auto, real or cpu")
    backend_was_up = kind != "real" and num_devices is not None and not _request_cpu_devices(num_devices)
    found = jax.devices("cpu") if kind == "cpu" else jax.devices()
    platform = found[0].platform
    if kind == "real" and platform == "cpu":
        raise ShardingError("no accelerator: JAX found only the CPU", fix='use devices "cpu" to emulate')
    if num_devices is None or len(found) >= num_devices:
        return found[:num_devices]
    what = f"the mesh needs {num_devices} devices and there are {len(found)} ({platform})"
    if backend_was_up and platform == "cpu":
        raise ShardingError(
            f"{what}: JAX was already running when the mesh was made, so no more can be emulated",
            fix="make the mesh before any other JAX call, or put first "
            f'jax.config.update("jax_num_cpu_devices", {num_devices})',
        )
    raise ShardingError(
        what, fix=f'name a mesh of at most {len(found)} devices, or use devices "cpu" to emulate {num_devices}'
    )


def _request_cpu_devices(num_devices: int) -> bool:
    """Asks for at least so many CPU devices; False when the backend is up already and the number is fixed."""
    try:
        jax.config.update("jax_num_cpu_devices", max(num_devices, jax.config.values["jax_num_cpu_devices"]))
    except RuntimeError:
        return False
    return True


def compile_only(topology: str, *, num_slices: int = 1) -> list[Any]:
    """Devices of a TPU that need not be there: the real compiler makes programs for them.

    A crash of the compiler ends the process, so compile in a child process.

    Args:
        topology: chip and torus, such as `"v5p:4x4x4"`, `"v5e:4x4"`, `"v6e:16x16"`.
        num_slices: slices of that shape.

    Raises:
        ShardingError: libtpu is not installed, or it does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ShardingError("compiling for a TPU needs libtpu", fix="pip install 'jax[tpu]'")
    # Without these, libtpu asks a metadata server that is not there, and lets one process at a time load it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ShardingError(
            f"topology {topology!r} cannot be described: {error}", fix='write a chip and a torus, as in "v5p:4x4x4"'
        ) from None
