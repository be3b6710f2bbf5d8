"""Plans and runs for people, without torch."""
