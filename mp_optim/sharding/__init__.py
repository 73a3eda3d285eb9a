"""Which rank: who owns which elements, and how gradients and parameters travel between ranks."""

from mp_optim.sharding.agreement import check_agreement, check_number, naming_missing_ranks
from mp_optim.sharding.buckets import Bucket, Entry
from mp_optim.sharding.fragments import ATTRIBUTES, Fragment, Watched, make_fragment
from mp_optim.sharding.transport import Transport, make_transport

__all__ = [
    "ATTRIBUTES",
    "Bucket",
    "Entry",
    "Fragment",
    "Transport",
    "Watched",
    "check_agreement",
    "check_number",
    "make_fragment",
    "make_transport",
    "naming_missing_ranks",
]
