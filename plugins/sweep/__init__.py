"""Sweeps: many layouts of one run, each as a process group of its own, and what they measured.

It is: the space of layouts and its filter, jobs and their folder, one record for each run, tables and pictures. It is
not: a planner, which predicts without running, nor a sweeper, which is Hydra's.
"""
