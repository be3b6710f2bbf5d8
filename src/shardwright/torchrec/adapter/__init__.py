"""TorchRec's models in as jobs, our plans out as its own: all that needs TorchRec installed."""
