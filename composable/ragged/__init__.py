"""The parameter that users see: a DTensor cut anywhere."""
