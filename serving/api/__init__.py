"""Routes, a module a resource: HTTP in, a call of the service, HTTP out."""
