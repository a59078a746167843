"""`recsys benchmark serve`: latency and throughput under load, equal answers under load, soaks.

The load generator shares the machine with the server that it measures, so every result says how
much of a core the generator took.
"""
