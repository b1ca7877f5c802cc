"""How bytes move between the ranks of a group, and how ranks agree."""
