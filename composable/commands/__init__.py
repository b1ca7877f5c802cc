"""The commands of ``python -m composable``; each file is imported when its command is chosen."""
