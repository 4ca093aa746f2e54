"""Checkpoints from the Hugging Face hub: found in its cache, fetched into it, verified.

    Entry ─► listing ─► what is missing ─► room on the disk? ─► bytes, by spans ─► hash ─► in its place
    (registry)  names, sizes, hashes                            (transfer)                 (cache)

The cache is the one every Hugging Face tool shares, so that what one has fetched none fetches again. Listing, tokens,
proxies, locks and deletion are huggingface_hub's. Moving the bytes is not: since its release 1.18 an interrupted
download starts at zero (huggingface_hub #4228, #4196), and one file of these checkpoints is up to 27 GB.

Nothing here imports torch, and huggingface_hub only where something is fetched or removed.
"""

from dgemma_local.hub.cache import folder_of, held, remove, root
from dgemma_local.hub.pull import fetch
from dgemma_local.hub.remote import remote_checkpoint
from dgemma_local.hub.transfer import Watch

__all__ = ["Watch", "fetch", "folder_of", "held", "remote_checkpoint", "remove", "root"]
