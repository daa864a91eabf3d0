"""Evidence: recorded runs that show a combination correct, and how fast. See ``schema`` for the format."""
