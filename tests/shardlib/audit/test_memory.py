import jax
import jax.numpy as jnp
import pytest

from meshes.errors import ShardingError
from shardlib.audit.memory import read_memory


@pytest.mark.newest
def test_memory_of_a_donated_sum():
    abstract = jax.ShapeDtypeStruct((256,), jnp.float32)
    found = read_memory(jax.jit(lambda x, y: x + y, donate_argnums=0).lower(abstract, abstract).compile())
    assert (found.argument_bytes, found.output_bytes, found.alias_bytes) == (2048, 1024, 1024)
    assert found.total_bytes == 2048 + found.temp_bytes


def test_temporaries_grow_with_the_live_activations():
    def temp_bytes(num_layers: int) -> int:
        def loss(x):
            return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ carry), None), x, None, length=num_layers)[0].sum()

        square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        return read_memory(jax.jit(jax.grad(loss)).lower(square).compile()).temp_bytes

    assert temp_bytes(16) - temp_bytes(12) == temp_bytes(12) - temp_bytes(8) >= 4 * 64 * 64 * 4


def test_a_backend_without_memory_analysis_is_an_error():
    class Silent:
        def memory_analysis(self):
            return None

    with pytest.raises(ShardingError, match="reports no memory analysis"):
        read_memory(Silent())  # type: ignore[arg-type]
