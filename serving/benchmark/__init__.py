"""Load on a running service: speed by concurrency and rate, equality under load, and soaks.

The generator shares the machine with the server it measures, so it is light (`client`), and says
how much of a core it took.
"""
