"""What a plan's constants stand for, timed on this machine by ranks that torchrun started."""
