"""Fields that follow from predicted ones: heights and winds on pressure levels, sea-level pressure, humidity, vorticity.

`vertical` and `horizontal` are differentiable functions of tensors; `levels` reads the coefficients of hybrid levels, and
`fields` applies the functions to the variables of an experiment.
"""
