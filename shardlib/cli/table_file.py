"""A user's own schedule in a file: CSV or JSON. Imports no JAX.

In: a path, where a schedule's name could stand too. Out: a `Table`, or an error that names the file.

    table = read_table(Path("mine.csv"))
"""

from pathlib import Path
from typing import Any


def is_table_file(text: str) -> bool:
    """Whether text that names a schedule means a file."""
    return text.endswith((".csv", ".json")) or "/" in text or Path(text).is_file()


def read_table(path: Path) -> Any:
    """The table in a file; its name is the file's, unless the table says another.

    Raises:
        ShardingError: a file that cannot be read, or that holds no table.
    """
    # Imported here, not above: these modules need NumPy, and `shardlib --help` must not wait for it.
    from meshes.errors import ShardingError
    from shardlib.pipeline.table import Table

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        fix = "a .csv file with one line per rank: F0,F1,B0,B1"
        raise ShardingError(f"cannot read {path}: {reason}", fix=fix) from None
    return Table.from_json(text) if path.suffix == ".json" else Table.parse(text, name=path.stem)
