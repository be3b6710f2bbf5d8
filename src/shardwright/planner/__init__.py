"""Chooses a placement for every table and unit inside one memory budget per rank."""
