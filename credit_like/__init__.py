"""credit_like: train WXFormer-type weather and climate models, with identical results in every parallel layout."""

__version__ = "0.1.0"
