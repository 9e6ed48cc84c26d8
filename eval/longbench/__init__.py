"""LongBench and LongBench-E: the benchmark's table of sets, rows, prompts and scores."""
