"""Benchmarks that the command line offers: `recsys benchmark ...`. Nothing else imports them.

A benchmark is an entry point in `recsys.benchmarks`, so programs around the library can add theirs.
Those here measure decoding: `workload` says on what, `timing` how a clock is read fairly, `decode`
and `sizes` what is compared with what, `report` shows it.
"""
