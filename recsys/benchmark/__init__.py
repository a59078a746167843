"""Benchmarks of the command line: `recsys benchmark ...`. The rest of the library imports none.

A benchmark is an entry point of the group `recsys.benchmarks`, so another package can add one.
This package has the report of all benchmarks (`report`), fair timing (`timing`), and the
benchmarks of decoding (`decode`, `workload`) and of the trie (`constraint`).
"""
