"""Embedding tables reached by route: ids travel to the rows, rows travel back."""
