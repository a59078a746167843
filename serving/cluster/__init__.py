"""More than one process: the service's application on Ray."""
