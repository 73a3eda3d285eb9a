"""Which rank: who owns which elements, and how gradients and parameters travel between ranks."""

from mp_optim.sharding.agreement import check_agreement, check_number, naming_missing_ranks
from mp_optim.sharding.buckets import Bucket, Entry, check_shardable, make_buckets
from mp_optim.sharding.fragments import Fragment, Watched
from mp_optim.sharding.gather import ParamGatherer
from mp_optim.sharding.hooks import GradReducer, ReduceSettings
from mp_optim.sharding.reduce import broadcast, uses_exchange

__all__ = [
    "Bucket",
    "Entry",
    "Fragment",
    "GradReducer",
    "ParamGatherer",
    "ReduceSettings",
    "Watched",
    "broadcast",
    "check_agreement",
    "check_number",
    "check_shardable",
    "make_buckets",
    "naming_missing_ranks",
    "uses_exchange",
]
