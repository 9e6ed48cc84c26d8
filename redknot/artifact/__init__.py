"""Stored document artifacts: identity, certificate, safe files, catalogue and the store over them."""
