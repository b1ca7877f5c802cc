"""When handles unshard, reshard and reduce, and on which stream."""
