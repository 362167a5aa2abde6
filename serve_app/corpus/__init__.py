"""`emberforge embed`: computes a corpus of files with a model and writes a folder of files (docs/decisions/043)."""
