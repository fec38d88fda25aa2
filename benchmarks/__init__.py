"""Measurements beside cuBLAS and torch.compile: build, run, table. See run.py."""
