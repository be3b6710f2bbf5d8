"""Click logs and text, read or made up, and the scores of what was learned."""
