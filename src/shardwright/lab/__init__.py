"""What runs on this machine: recordings, estimates, training, comparison, calibration."""
