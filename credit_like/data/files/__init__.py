"""Access to files that sources share: netCDF under one lock, chunks of zarr arrays, reads into existing memory, regridding."""
