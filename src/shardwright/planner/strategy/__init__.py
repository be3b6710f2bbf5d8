"""How a job is searched: whole steps, tables alone, and the spaces of both."""
