"""Sweeps: a grid of cells, run in this process or in several, and gone on with after anything."""
