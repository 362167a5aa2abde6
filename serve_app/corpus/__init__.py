"""`emberforge embed`: a corpus of files through a model, into a folder of files (docs/decisions/043)."""
