"""Serves embedding models: HTTP and gRPC in, vectors out."""
