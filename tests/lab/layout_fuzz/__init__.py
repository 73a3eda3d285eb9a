"""Random layouts of ranks, each held against one process that steps the summed gradients."""
