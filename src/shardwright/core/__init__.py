"""Frozen values that every floor shares: standard library and msgspec only."""
