"""The gateway: takes requests and sends each one to the replica that should finish it first."""
