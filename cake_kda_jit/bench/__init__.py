"""Measurements: random problems with FP64 references, precision tables, timings."""
