"""Built-in models; replace them with your own."""
