"""The front of a cluster: it takes requests and sends each one to the replica that finishes it first."""
