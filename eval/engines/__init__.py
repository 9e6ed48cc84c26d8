"""What answers an evaluation's requests: the embedded engine, or a server."""
