"""Offline: documents in, artifacts out."""
