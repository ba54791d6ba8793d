"""Corrections of each predicted step: one file each, with formula and source.

A plug-in has a `Config`,

    find(config, variables)

which returns where the quantities that it corrects lie among the channels, raises UserError for variables that the
model does not have, and needs no torch, and

    build(config, variables, store, statistics, rows=slice(None), reduce=identity) -> nn.Module

whose forward(after_BCHW, before_BCHW) takes the prognostic and diagnostic channels that the model predicted, in
physical units, and the prognostic channels of the state before, and returns the corrected prediction. The stepper
applies them in the order of the experiment's `physics`, in training and in forecasts, so they are differentiable.
`rows` are this rank's, and `reduce` sums a partial mean over the ranks that share a sample.
"""
