"""Plots as SVG: pure functions from figures to a picture, equal for equal figures."""
