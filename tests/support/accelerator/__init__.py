"""A simulated accelerator for the package's own ``CudaTransfer``, pipeline, worker and hooks.

Three things are done at once, and none knows of the others.
"""
