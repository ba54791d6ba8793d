"""Parts of an experiment that are not in the package: a loss, a model, a metric and a source."""

__version__ = "1.2"
