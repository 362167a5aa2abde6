"""Benchmarks. Each one prints tables, and writes them into loadtests/results/ with the machine that it ran on."""
