"""Other implementations of the items of models.py, each a module with ``offer(item, model)``: what runs it, and how its
results compare. They run in processes of their own (benchmarks/worker.py): coda-kernels installs a package ``coda``."""
