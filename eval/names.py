"""What the tools that write results and the report that reads them agree on beside the records."""

from __future__ import annotations

RECOMPUTE = "recompute"
NO_DOCUMENTS = "no-documents"  # recompute of the question alone: what the documents are worth; not an arm to be named
NOISE_FLOOR = "noise-floor"  # recompute run in another way that is as exact
TIMING_REJECTED = "timing: "  # in front of the reason of what was rejected when it was timed
QUESTION = "\nQuestion: What do these documents say?\nAnswer:"  # behind a corpus that brings none
INFORMATIVE = 0.10  # by which recompute must beat the answer without documents (DESIGN 8)


def is_informative(recompute: float, no_documents: float) -> bool:
    """Whether a data set needs its documents, by the mean scores (0 to 1) of both."""
    return recompute - no_documents >= INFORMATIVE - 1e-9  # 10 points of binary scores are not exactly 0.1
