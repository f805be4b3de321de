"""Measurements, side by side with the same work written by hand: `python -m benchmarks.NAME`, see README.md."""
