"""Closed forms: what a plan will move, store and take, before anything is compiled."""
