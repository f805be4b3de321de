"""The command line: `shardlib explain | train | demo | schedule`."""

from shardlib.cli.app import main

__all__ = ["main"]
