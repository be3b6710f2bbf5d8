"""Megatron-LM as a runtime profile: what a rank of it holds during a training step, from its
command line. States are arithmetic; activations are a table of what each module keeps for its
backward; the schedule of the pipeline says what is alive together."""
