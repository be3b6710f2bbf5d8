"""A job: its sections, their rules, and the plan that was made for it."""
