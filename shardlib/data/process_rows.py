"""The rows of a global batch that one of several processes feeds.

In: the batch's size, which process of how many. Out: a range of rows.

    rows = process_rows(batch=16, process=1, num_processes=4)    # range(4, 8)
"""

from meshes.errors import ShardingError


def process_rows(*, batch: int, process: int, num_processes: int) -> range:
    """Equal parts of the batch in the order of processes, which is that of a mesh with its data-like axes outermost.

    Args:
        batch: rows of the global batch.
        process: index of the process, as `jax.process_index()`.
        num_processes: how many there are, as `jax.process_count()`.

    Returns:
        The rows of this process; together the processes have each row once.

    Raises:
        ShardingError: processes that do not divide the batch: rounding down would lose rows of it.
    """
    if not 0 <= process < num_processes:
        raise ShardingError(
            f"process {process} is not one of {num_processes}",
            fix="count processes from 0, as jax.process_index() does",
        )
    if batch < 1 or batch % num_processes:
        below, above = batch - batch % num_processes, batch + -batch % num_processes
        sizes = [str(size) for size in (below, above or num_processes) if size > 0]
        raise ShardingError(
            f"a global batch of {batch} rows is not divisible by {num_processes} processes",
            fix=f"use a batch of {' or '.join(dict.fromkeys(sizes))} rows",
        )
    rows = batch // num_processes
    return range(process * rows, (process + 1) * rows)
