"""Reads compiled programs: which collectives run, over which devices, how often, with how many bytes."""
