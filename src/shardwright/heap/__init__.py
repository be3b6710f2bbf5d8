"""Memory before the run: the step's schedule, run symbolically."""
