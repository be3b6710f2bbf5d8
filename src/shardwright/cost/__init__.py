"""Pure functions from core values to bytes and seconds; no literal without a name."""
