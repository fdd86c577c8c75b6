"""Benchmarks: ``python -m benchmarks.attention``, ``benchmarks.dsa``, ``benchmarks.launch``; see README.md."""
