"""Models small enough to read in a minute; `shardlib demo` runs them."""
