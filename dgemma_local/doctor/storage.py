"""The disk, the cache of checkpoints and what state they are in, the way to the hub, templates and tokenizers."""

import hashlib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from dgemma_local import hub
from dgemma_local.checkpoint import open_checkpoint, refuse_special_files
from dgemma_local.config import load_generation_config, load_model_config
from dgemma_local.doctor.examination import Check, Machine, within
from dgemma_local.doctor.finding import Finding, fail, ok, skip, warn
from dgemma_local.errors import DgemmaError
from dgemma_local.hub.failures import size
from dgemma_local.hub.pull import MARGIN, verify_alone
from dgemma_local.registry import Entry, is_demo, table

ONLINE_LIMIT = 3.0  # seconds for the hub to answer in
DISK = 20.0  # seconds for what lies on one disk: a network's may sleep
ANOTHER_DISK = "look after that disk, or set HF_HOME to a folder on another"
HUB = "https://huggingface.co"
TRUE = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads its variables
# Published chat templates by the beginning of their sha256
TEMPLATES = {
    "36e3a42e": "as launched: an empty thought is given where thinking is off",
    "2f1b4d75": "without the empty thought",
    "9aeb7eac": "Google's of 2026-07",
}


def models(machine: Machine) -> Iterator[Finding]:
    """The table of models, the user's own included."""
    machine.models = table()
    yield ok("models", f"{len(machine.models)} in the table", names=list(machine.models))


def disk(machine: Machine) -> Iterator[Finding]:
    """Room where the cache is, against what the card's checkpoint takes."""
    root = hub.root()
    there = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(there).free
    wanted = machine.wanted
    entry = None if wanted is None else wanted.entry
    need = 0 if entry is None or hub.folder_of(entry) is not None else max(0, (entry.bytes or 0) - hub.held(entry))
    facts = {"cache": str(root), "free": free, "needed": need}
    elsewhere = "make room, or set HF_HOME to a folder on another disk"
    if not there.is_dir():
        yield fail(
            "disk",
            f"{there} is no folder, and the cache is to be in it",
            "remove it, or set HF_HOME to a folder",
            **facts,
        )
    elif not os.access(there, os.W_OK):
        yield fail(
            "disk", f"{there} may not be written", "check its permissions, or set HF_HOME to a folder of yours", **facts
        )
    elif free < MARGIN:
        yield fail("disk", f"{size(free)} free for {root}: the disk is full", elsewhere, **facts)
    elif entry is not None and need and free < need + MARGIN:
        what = (
            f"{size(free)} free for {root}, and {size(need)} of {entry.name} are to come, with {size(MARGIN)} to spare"
        )
        yield fail("disk", what, elsewhere, **facts)
    else:
        to_come = "" if entry is None or not need else f"; {size(need)} of {entry.name} are to come"
        yield ok("disk", f"{size(free)} free for {root}{to_come}", **facts)


def checkpoints(machine: Machine) -> Iterator[Finding]:
    """Each model that is on this machine, whole or in part; and whether the card's is."""
    hub.root()  # raises where the cache cannot be, once and not for each model
    absent = []
    for entry in machine.models.values():
        one = Check(
            f"model {entry.name}", partial(_checkpoint, entry), DISK, ANOTHER_DISK
        )  # a late one costs itself alone
        found = list(within(one, machine))
        yield from found
        if not found:
            absent.append(entry.name)
    wanted = machine.wanted
    if absent:
        yield skip("models", f"not fetched: {', '.join(absent)}", absent=absent)
    if wanted is not None and wanted.entry.name in absent:
        yield warn("models", f"the one for this card, {wanted.entry.name}, is not fetched", "run `dgemma pull`")


def _checkpoint(entry: Entry, machine: Machine) -> Iterator[Finding]:
    """By its configurations, headers and lengths, as a run reads them first. Nothing: nothing of it is here."""
    name, folder = f"model {entry.name}", entry.folder or hub.folder_of(entry)
    if folder is None:
        if count := hub.held(entry):
            whole = f" of {size(entry.bytes)}" if entry.bytes else ""
            cure = f"`dgemma pull {entry.name}` brings the rest"
            yield warn(name, f"{size(count)}{whole} are here", cure, held=count)
        return
    refuse_special_files(folder)
    load_generation_config(folder, load_model_config(folder).vocab_size)
    checkpoint = open_checkpoint(folder)
    machine.folders[entry.name] = folder
    if entry.folder is None:
        where, more = size(hub.held(entry)), "hashes"
    else:
        where, more = "of this package" if is_demo(folder) else f"in {folder}", "reads"
    unread = "" if machine.verify else f"; --verify {more} what they hold"
    what = f"{len(checkpoint.tensors)} tensors, {where}: configurations, headers and lengths are right{unread}"
    yield ok(name, what, folder=str(folder), tensors=len(checkpoint.tensors))


def hashes(machine: Machine) -> Iterator[Finding]:
    """Of each fetched checkpoint, where that is asked for: the name of a blob is its hash."""
    if not machine.verify:
        return
    for model, folder in list(machine.folders.items()):
        entry = machine.models[model]
        if entry.folder is not None:
            continue
        try:
            verify_alone(entry, folder, machine.watch)
            yield ok(f"hashes {model}", "every file is what its hash was made from", folder=str(folder))
        except DgemmaError as error:
            del machine.folders[model]  # no text of it is looked at
            yield fail(f"hashes {model}", error.what, error.fix, folder=str(folder))


def online(machine: Machine) -> Iterator[Finding]:
    """Whether the hub answers. That counts where something is to be fetched."""
    wanted = machine.wanted
    needed = wanted is not None and wanted.entry.name not in machine.folders
    address = os.environ.get("HF_ENDPOINT") or HUB
    try:
        parts = urlsplit(address)
    except ValueError:  # of brackets
        parts = urlsplit("")
    shown = f"{parts.scheme}://{parts.hostname}"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE:
        what = "HF_HUB_OFFLINE is set"
        yield warn("hub", f"{what}, and {wanted.entry.name} is not here", "unset it") if needed and wanted else ok("hub", f"{what}; nothing is needed")  # fmt: skip
        return
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield fail("hub", f"HF_ENDPOINT={address!r} is no server's address", "correct it: it begins with https://")
        return
    trouble = _trouble(address)
    if trouble is None:
        yield ok("hub", f"{shown} answers")
    elif needed and wanted:
        cure = "check the network, HF_ENDPOINT and HTTPS_PROXY; files can be brought by hand: `folder` in models.toml"
        yield warn("hub", f"{shown} does not: {trouble}; {wanted.entry.name} is not here", cure)
    else:
        yield ok("hub", f"offline ({trouble}); nothing is needed from it")


def _trouble(address: str) -> str | None:
    """Why a server gives no answer; None where it gives any."""
    request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "dgemma"})
    try:
        with urllib.request.urlopen(request, timeout=ONLINE_LIMIT):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return f"error {error.code}" if error.code >= 500 else None
    except (OSError, HTTPException) as error:  # URLError, a timeout while it answers, an answer that is no HTTP
        return str(getattr(error, "reason", error)) or type(error).__name__


def tokenizers(machine: Machine) -> Iterator[Finding]:
    """Of each checkpoint that is here: whether its vocabulary and template go together, and which template it is."""
    from dgemma_local.tokens import Tokenizer

    for model, folder in list(machine.folders.items()):  # one that was left behind may add to them still
        name = f"text {model}"
        try:
            tokenizer = Tokenizer.load(folder, load_model_config(folder).vocab_size)
            tokenizer.render([{"role": "user", "content": "Hi"}])
        except DgemmaError as error:
            yield fail(name, error.what, error.fix)
            continue
        special = tokenizer.special
        digest = _template(folder)
        known = TEMPLATES.get(digest[:8], "the demo's" if is_demo(folder) else "not one of the published")
        ids: dict[str, list[int | None]] = {
            "turn": [special.turn_open, special.turn_close],
            "channel": [special.channel_open, special.channel_close],
        }
        ids |= {"think": [special.think], "call": [special.call_open, special.call_close]}
        what = f"{tokenizer.vocab_size:,} tokens; <|turn> {special.turn_open}, <|channel> {special.channel_open}; template {digest[:8]}, {known}"  # fmt: skip
        yield ok(name, what, template_sha256=digest, markers=ids)


def _template(folder: Path) -> str:
    """sha256 of the chat template; "" where it stands in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
