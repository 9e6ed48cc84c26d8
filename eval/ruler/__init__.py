"""RULER: rows as published, their parts, and the two string matches."""
