"""What an annotation will do, decided before anything is changed: names and shapes in, numbers out."""
