"""Scores of one answer against one reference, between 0 and 1, as LongBench computes them."""
