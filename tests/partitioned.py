"""The program of one device as the partitioner leaves it, before the backend changes the dtypes of its collectives.

In: what `jax.jit(...).lower(...)` returned. Out: HLO text for `shardlib.audit.hlo.parse`.
"""

import tempfile
from pathlib import Path
from typing import Any


def partitioned(lowered: Any) -> str:
    """The text after XLA's partitioning pass; this compiles."""
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"})
        (found,) = Path(folder).glob("*after_spmd-partitioning*")
        return found.read_text()
