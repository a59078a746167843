"""Wire format of requests and responses. Unknown fields are refused, and sizes are limited."""
