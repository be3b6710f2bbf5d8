"""One command that measures on a GPU machine what is claimed of it: ``run.sh``."""
