"""A simulated accelerator: the product's own ``CudaTransfer``, host pipeline, worker thread and
hooks, unchanged, on devices of a type of their own, whose memory is the host's.

Three things are done at once, and none knows of the others.

**Tensors say where they are.** Their memory is the host's. What lies on a device says so, and the
package finds the simulation by the door that it has for every accelerator.

**Work is delayed for real.** What torch operations and copies do to memory of the
device is queued on the simulated stream that is current, and carried out only when the host waits
for it: an event, ``.item()``, a blocking copy. Outputs hold NaN until then. Within what streams and
events allow, the order is the run's choice (:class:`~support.accelerator.streams.Pace`). So a
missing wait gives wrong bits.

**Who may touch what is judged by vector clocks.** Each stream and each host thread has one. Queued
work starts with the clock of the thread that queues it; a stream that waits for an event, and a
thread that does, takes over the event's clock; threads take over each other's at locks. An access
that does not know of the last write, or a write that does not know of the last reads, is reported,
whether or not the bits came out right this time. The model is ``torch.cuda._sanitizer``, which
knows neither host threads nor host memory.

Memory is never freed before the simulation ends, so addresses are never used twice; that the
product let go of a tensor is seen by its storage's reference count, and then a stream that may
still use the memory has to be known to the allocator (``record_stream``).

What it does not see: kernels that run on an accelerator only (Triton, apex, Transformer Engine).

Modules: ``clocks`` and ``memory`` judge, ``streams`` delays, ``operations``, ``launches`` and
``threads`` see what is done, ``simulation`` has all of it, ``stand_in`` has the package find it as
an accelerator of its own, ``devices`` has tensors say so, ``schedules`` are runs of the product,
``saves`` are their saves in the background, ``removals`` takes waits out of the product.
"""
