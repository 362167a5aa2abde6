"""The server: HTTP and gRPC in front of the engine, as Ray Serve applications."""
