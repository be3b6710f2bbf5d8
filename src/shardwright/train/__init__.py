"""One run: its data, its loop, its measurements, and what they are held against."""
