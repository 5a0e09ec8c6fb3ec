"""Autoregressive engines. This room knows nothing of the runtime."""
