"""The base, which knows no handle and imports only errors."""
