"""What a module takes and frees in a step, traced on fake tensors."""
