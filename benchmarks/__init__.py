"""Correctness and speed on a GPU, one command line: `python -m benchmarks --help`. See NOTES.md."""
