"""Devices for a mesh: the real ones or emulated CPU devices. The only caller of `jax.devices()`.

In: how many are needed and of which kind. Out: JAX devices, or an error that says how to get enough.

    find(8, kind="cpu")    # eight emulated CPU devices in this process
"""

from typing import Any, Literal, get_args

import jax

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
