"""A job's layout in the words of the engines that run it, a file each."""
