"""Flax layers that models take ready-made: linen in modules of their own name, NNX in those that end in `_nnx`."""
