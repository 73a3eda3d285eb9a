"""Which rank: who owns which elements, and how gradients and parameters travel between ranks."""

from mp_optim.sharding import statements
from mp_optim.sharding.agreement import check_agreement, check_number
from mp_optim.sharding.buckets import Bucket, Entry
from mp_optim.sharding.fragments import ATTRIBUTES, Fragment, Watched, make_fragment
from mp_optim.sharding.hooks import GradReducer
from mp_optim.sharding.order import reduce_in_one_order
from mp_optim.sharding.transport import Reducer, Transport, make_transport

__all__ = [
    "ATTRIBUTES",
    "Bucket",
    "Entry",
    "Fragment",
    "GradReducer",
    "Reducer",
    "Transport",
    "Watched",
    "check_agreement",
    "check_number",
    "make_fragment",
    "make_transport",
    "reduce_in_one_order",
    "statements",
]
