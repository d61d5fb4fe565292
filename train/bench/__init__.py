"""Benchmarks of training: what each family is worth on recorded routing, and what an epoch takes."""
