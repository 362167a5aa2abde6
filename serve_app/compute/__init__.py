"""Computes the results of requests, for every dialect and for gRPC: vectors, chunks, scores, text, quantisation."""
