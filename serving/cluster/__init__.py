"""The service in several processes, on Ray."""
