"""Benchmarks: each prints a table, and writes it with the machine it ran on into loadtests/results/."""
