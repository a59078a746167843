"""Wire format: what goes in and out over HTTP. Unknown fields are refused, sizes are bounded."""
