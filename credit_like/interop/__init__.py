"""Models of this package behind the interfaces of other packages, which are not needed to import them."""
