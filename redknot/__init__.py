"""RedKnot: long-context DeepSeek-V4 requests that start faster by reusing documents evaluated once, offline."""

__version__ = "0.1.0"
