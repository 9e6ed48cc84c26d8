"""Questions about documents in nano's language, drawn fresh."""
