"""From token files to batches: windows, packed rows, mixtures, streams, the loader."""
