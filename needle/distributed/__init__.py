"""Many processes, one training: start ranks, connect them, share a step, detect missing ranks."""
