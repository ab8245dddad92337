"""File format: sealed files, their HDF5 layout, and reading without HDF5's parser."""
