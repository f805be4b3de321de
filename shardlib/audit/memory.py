"""Bytes a compiled program needs on one device, as the compiler counts them.

In: a compiled function. Out: a `Memory`.

    read_memory(jax.jit(step).lower(*arguments).compile()).temp_bytes
"""

from dataclasses import dataclass

import jax

from meshes.errors import ShardingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Device memory of one execution, in bytes per device; a static leaf.

    Args:
        argument_bytes: inputs.
        output_bytes: results, those that reuse a donated input included.
        temp_bytes: everything live only in between; on CPU deterministic and linear in live activations.
        alias_bytes: results that reuse a donated input, counted in both of the first two.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def total_bytes(self) -> int:
        """Arguments, results and temporaries, donated buffers counted once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


def read_memory(compiled: jax.stages.Compiled, /) -> Memory:
    """Reads `compiled.memory_analysis()`.

    Raises:
        ShardingError: the backend does not report memory.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ShardingError("this backend reports no memory analysis of compiled programs")
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
    )
