"""Higgs Audio v2: a Llama decoder in which audio frames have norms and MLPs of their own."""
