"""What requests compute, in any dialect and over gRPC: vectors, chunks, scores, quantisation."""
