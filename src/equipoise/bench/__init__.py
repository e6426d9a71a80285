"""Benchmarks that ship with the package: `equipoise bench ...`."""
