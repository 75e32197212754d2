"""Pallas Mosaic GPU kernels, one idea a file. Nothing here knows who called it: each is a function of static shapes."""
