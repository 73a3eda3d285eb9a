"""A simulated accelerator for the package's own ``CudaTransfer``, pipeline, worker and hooks.

Streams, host threads and the disk run concurrently without knowing of each other.
"""
