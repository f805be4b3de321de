"""Per-shard bodies of replaceable operations."""
