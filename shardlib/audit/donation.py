"""Which donated arguments a compiled program does not reuse: each costs its bytes twice.

In: a compiled program. Out: one `UnusedDonation` per array, with its path and bytes; or an error in strict mode.

    check_donations(trainer.compiled)
"""

import math
import re
from dataclasses import dataclass

import jax

from meshes.errors import raise_collected
from shardlib.specs import itemsize
from shardlib.tree_paths import path_text

_ALIASES = re.compile(r"input_output_alias=\{(.*?)\}, entry_computation_layout", re.DOTALL)
_PARAMETER = re.compile(r":\s*\((\d+),")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedDonation:
    """A donated array whose memory no result takes over; a static value.

    Args:
        path: where it is: the argument's position or name, then the path inside it.
        shape: of the whole array.
        bytes_per_device: of the shard each device holds, kept beside the results.
        reason: why, as far as the program tells.
    """

    path: str
    shape: tuple[int, ...]
    bytes_per_device: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} {list(self.shape)}: {self.bytes_per_device:,} bytes on each device, {self.reason}"


def unused_donations(compiled: jax.stages.Compiled, /) -> tuple[UnusedDonation, ...]:
    """The donated arrays that the program does not reuse for a result, in the order of the arguments.

    Args:
        compiled: what `jax.jit(..., donate_argnums=...).lower(...).compile()` returned.
    """
    infos, structure = jax.tree_util.tree_flatten_with_path(compiled.args_info)
    # An argument that the program does not read has no sharding, and no number in the program.
    places = structure.flatten_up_to(compiled.input_shardings)
    found = _ALIASES.search((compiled.as_text() or "").split("\n", 1)[0])
    reused = set(map(int, _PARAMETER.findall(found[1]))) if found else set()
    unused: list[UnusedDonation] = []
    number = 0
    for (path, info), place in zip(infos, places, strict=True):
        is_read = place is not None
        if info.donated and not (is_read and number in reused):
            shape = tuple(info.shape)
            local = place.shard_shape(shape) if is_read else shape
            unused.append(
                UnusedDonation(
                    path=path_text(path[1:]),
                    shape=shape,
                    bytes_per_device=math.prod(local) * itemsize(str(info.dtype)),
                    reason="no result has its bytes: another spec or dtype"
                    if is_read
                    else "the program never reads it",
                )
            )
        number += is_read
    return tuple(unused)


def check_donations(compiled: jax.stages.Compiled, /) -> None:
    """Raises for a program that does not reuse all that was donated to it.

    Raises:
        ShardingError: every such array with its path and bytes.
    """
    raise_collected(
        [str(unused) for unused in unused_donations(compiled)],
        heading="donated arrays are not reused; fix: give results the shardings of what they replace (out_shardings):",
    )
