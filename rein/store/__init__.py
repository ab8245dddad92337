"""Files of a run: trajectories, checkpoints and metrics, written during training and read back.

Modules:
  trajectories   `hdf5` (`HDF5Store`, writes), `reader` (`open_run`), `datasets`, `memory` (`MemoryStore`)
  checkpoints    `checkpoint_file` (content), `checkpoint_folder` (which ones are kept), `loading` (`resume`, `load`)
  metrics        `metrics` (CSV files and `metrics.h5`)
  a whole run    `folder`, `lock`, `verify`, `compact`
  file format    `format`; its specification is `docs/reference/file_format.md`
"""
