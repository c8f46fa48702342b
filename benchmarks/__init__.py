"""Benchmarks of syncbn_cuda: one file a question, one shared harness."""
