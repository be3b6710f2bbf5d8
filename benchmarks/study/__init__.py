"""Kinds of embeddings trained on the same rows: quality beside parameters and latency.

``PYTHONPATH=benchmarks python -m study JOB.toml`` trains every kind of the job's ``[study]``.
"""
