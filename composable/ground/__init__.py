"""The base of the other folders: it uses no handle, and imports only errors."""
