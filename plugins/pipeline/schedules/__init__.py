"""The schedules Parallax brings, one file per family; found by name through `catalog.py`."""
