"""Predictions beside memory that others measured and published."""
