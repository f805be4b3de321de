"""The version, read by the build and by `shardlib --version`."""

__version__ = "0.1.0"
