"""TEI's gRPC services."""
