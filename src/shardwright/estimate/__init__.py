"""What a job takes before it runs, with a plan and without one."""
