"""A model of how fast an optimizer step is, whose state lies in host memory: stepped by the host,
streamed through the accelerator, or both at once. Nothing here is measured."""
