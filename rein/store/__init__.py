"""Files of a run: trajectories, checkpoints and metrics, written during training and read back.

Modules:
  trajectories   `hdf5` (`HDF5Store`, writes), `memory_store` (`MemoryStore`), `reader` (`open_run`), `row_index`
                 (finds the rows of transitions and episodes), `datasets`
  checkpoints    `checkpoint_file` (content), `checkpoint_folder` (which ones are kept), `loading` (`resume`, `load`)
  metrics        `metrics_files` (CSV files and `metrics.h5`)
  a whole run    `folder` (names and lock), `runs` (`list_runs`), `verify`, `compact`
  file format    `format`; its specification is `docs/reference/file_format.md`
"""
