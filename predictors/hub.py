"""Bundles on the Hugging Face Hub: `hub:OWNER/NAME@REVISION` is fetched and verified, a bundle is pushed with its card.

Knows the files that a bundle has and fetches no other; what arrives is checked against the checksums of its card before
anybody loads it. Tokens are those of `hf auth login` or HF_TOKEN; none is read or written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..collect.errors import BundleError, SettingError
from .bundle import AHEAD, CARD, GRAPH, WEIGHTS, Bundle
from .model_card import model_card

PREFIX = "hub:"
README = "README.md"
SPELLING = f"{PREFIX}OWNER/NAME or {PREFIX}OWNER/NAME@REVISION"
# The hub's own rules; "..", which would leave a folder, is in neither.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


class HubName(NamedTuple):
    """Where a bundle stands on the hub."""

    repo: str
    """OWNER/NAME."""
    revision: str | None = None
    """Branch, tag or commit; None for the newest."""

    @classmethod
    def parse(cls, name: str) -> HubName:
        """Read `OWNER/NAME[@REVISION]`, with or without the prefix.

        Raises:
            SettingError: if it is none.
        """
        repo, at, revision = name.removeprefix(PREFIX).partition("@")
        fine = _NAME.fullmatch(repo) and ".." not in name and (not at or _REVISION.fullmatch(revision))
        if not fine:
            raise SettingError(f"A bundle on the hub is named {SPELLING}, got {name!r}.")
        return cls(repo, revision or None)


def local_bundle(bundle: str | Path) -> Path:
    """Give the folder of a bundle: the path itself, or that of what a `hub:` name fetches.

    Raises:
        SettingError: if the name is no name on the hub.
        BundleError: as `from_hub`.
    """
    return from_hub(str(bundle)).path if str(bundle).startswith(PREFIX) else Path(bundle)


def from_hub(name: str) -> Bundle:
    """Fetch a bundle into the hub's cache, or find it there, and verify it.

    All files are of one commit. Without a network the cache alone is asked.

    Raises:
        SettingError: if the name is no name on the hub.
        BundleError: if there is none, it cannot be fetched, or it is damaged, altered or of another format version.
    """
    from huggingface_hub import hf_hub_download

    repo, revision = HubName.parse(name)

    def fetch(file: str, revision: str | None) -> Path:
        with _told(f"{PREFIX}{repo}{f'@{revision}' if revision else ''}", file):
            return Path(hf_hub_download(repo, file, revision=revision))

    card = fetch(CARD, revision)
    commit = card.parent.name  # the cache has a folder for each
    for file in _files(_horizon(card)):
        fetch(file, commit)
    return Bundle.open(card.parent)


def push_to_hub(bundle: str | Path | Bundle, repo: str, *, private: bool = False) -> str:
    """Write a bundle and a model card made from its card into a repository, which is made where there is none.

    Args:
        repo: OWNER/NAME, with or without `hub:`.
        private: whether a repository that is made is private; one that exists stays as it is.

    Returns:
        address of the commit.

    Raises:
        SettingError: if the repository is no name on the hub.
        BundleError: if the bundle is damaged, or the hub does not take it.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    target = check_target(repo)
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    contents: dict[str, Any] = {name: opened.path / name for name in _files(opened.spec.horizon)}
    contents[README] = model_card(opened.card, target.repo).encode()
    with _told(f"{PREFIX}{target.repo}", "the bundle"):
        api = HfApi()
        api.create_repo(target.repo, private=private, exist_ok=True)
        operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
        done = api.create_commit(target.repo, operations, commit_message=f"Add the predictor {opened.spec.family}")
    return str(done.commit_url)


def check_target(repo: str) -> HubName:
    """Refuse what is no place to push a bundle to, before anything slow.

    Raises:
        SettingError: if it is no OWNER/NAME, or names a revision.
    """
    target = HubName.parse(repo)
    if target.revision is not None:
        raise SettingError(f"A bundle is pushed to the newest state of OWNER/NAME, got {repo!r}; leave out @REVISION.")
    return target


def _files(horizon: object) -> list[str]:
    """Name the files of a bundle; never taken from a card, which could name any path."""
    return [CARD, GRAPH, WEIGHTS, *([AHEAD] if horizon == "layer" else [])]


def _horizon(card: Path) -> str | None:
    """Read from a card what decides which files there are; `Bundle.open` says what is wrong with a damaged one."""
    import json

    try:
        value = json.loads(card.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return value.get("horizon") if isinstance(value, dict) else None


@contextmanager
def _told(name: str, what: str) -> Iterator[None]:
    """Say in one sentence what the hub answered."""
    from huggingface_hub import errors

    # failures of whichever HTTP client this version uses; KeyErrors and ValueErrors are answers that no hub gives
    failures = cast(tuple[type[Exception], ...], (*errors.HfHubHTTPError.__bases__, OSError, KeyError, ValueError))
    try:
        yield
    except errors.HFValidationError as error:
        raise SettingError(f"A bundle on the hub is named {SPELLING}, got {name!r}.") from error
    except errors.RevisionNotFoundError as error:
        raise BundleError(f"{name} does not exist: there is no such revision; leave it out or check it.") from error
    except errors.RepositoryNotFoundError as error:
        raise BundleError(
            f"{name} does not exist on the hub, or is private and needs hf auth login; check the name."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise BundleError(
            f"{name} is not in the hub's cache and could not be fetched ({what}); connect to the network, unset "
            "HF_HUB_OFFLINE, or give a folder."
        ) from error
    except errors.EntryNotFoundError as error:
        raise BundleError(f"{name} is no predictor bundle: it has no {what}; give one that foregate pushed.") from error
    except failures as error:
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        raise BundleError(f"{name} could not be reached for {what} ({reason}); try again or use a folder.") from error
