"""`python -m shardlib` is the `shardlib` command."""

from shardlib.cli import main

main()
