"""Paired evaluation of reuse against recompute: data sets, prompts and metrics; never imported by redknot."""
