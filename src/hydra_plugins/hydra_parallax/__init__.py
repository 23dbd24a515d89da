"""What Hydra finds of Parallax: a launcher, a source of configurations, two resolvers.

It is: the names Hydra looks for in its namespace package `hydra_plugins`, each a few lines that import Parallax when
they are used and not before: Hydra loads this in every program. It is not: the work (`parallax.plugins.sweep`,
`parallax.conf`).
"""
