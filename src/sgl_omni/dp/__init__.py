"""Same-GPU data parallelism: several whole servers on one GPU, started, checked and ended as one run."""
