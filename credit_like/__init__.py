"""credit_like: train weather and climate models of the WXFormer kind, and trust the numbers in every layout."""

__version__ = "0.1.0"
