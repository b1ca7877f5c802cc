"""What all the rest stands on: it knows no handle, and imports nothing of the package but errors."""
