"""Errors between here and the Hub: one sentence each, which says what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


LONGEST = 300  # characters of what a Hub said that are repeated in a message


class HubError(OSError):
    """A push or pull that failed; the message says why and what to do, in characters that a terminal only prints."""

    def __init__(self, message: str):
        super().__init__(printable(message))


def printable(text: object, longest: int | None = None) -> str:
    """A text of somebody else as it may be printed: control characters, terminal escapes and the like as \\x1b.

    Args:
        longest: characters that are kept; all of them if None.
    """
    text = str(text)
    if longest is not None and len(text) > longest:
        text = text[:longest] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def hub_errors(action: str, repo_id: str, revision: str | None = None, token: str | None = None) -> Iterator[None]:
    """Turns what huggingface_hub raises inside the block into a `HubError` with one sentence.

    Args:
        action: "push" or "pull".
    """
    try:
        yield
    except HubError:
        raise
    except (HTTPError, OSError, RuntimeError) as error:
        has_token = bool(token or get_token())
        causes = (_explained(cause, action, repo_id, revision, has_token) for cause in _causes(error))
        said = next(filter(None, causes), None)
        if said is None:
            raise
        raise HubError(said) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those it was raised from: the library wraps what happened in a thread."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explained(error: BaseException, action: str, repo_id: str, revision: str | None, has_token: bool) -> str | None:
    kept = "readers still see what was there before" if action == "push" else "what was downloaded is kept"
    again = f"{kept}. Run the same command again: it goes on where it stopped"
    if isinstance(error, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, so nothing is sent or fetched: unset it to {action}"
    if isinstance(error, LocalTokenNotFoundError):
        return f"there is no token, and this {action} needs one: `hf auth login`, or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated: ask for access on its page, with the account of your token"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}; expected a branch, a tag or the sha of a commit"
    if isinstance(error, RepositoryNotFoundError):
        return _no_repository(repo_id, has_token)
    if isinstance(error, HfHubHTTPError):
        return _refused(error, action, repo_id, again)
    if isinstance(error, HTTPError):
        return f"the connection to {constants.ENDPOINT} failed ({type(error).__name__}: {error}); {again}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" of {error.filename}" if error.filename else ""
        return f"the disk{where} is full ({error.strerror}); what is there is kept. Free some space and run again"
    return None


def _no_repository(repo_id: str, has_token: bool) -> str:
    if not has_token:
        return f"{repo_id} does not exist, or is private and there is no token: `hf auth login`, or set HF_TOKEN"
    return f"{repo_id} does not exist, or is private and your token may not read it; check the name and the token"


def _refused(error: HfHubHTTPError, action: str, repo_id: str, again: str) -> str | None:
    status, said = error.response.status_code, printable(error.server_message or "no reason given", LONGEST)
    if status == 401:
        return f"the Hub refused the token ({said}): it is wrong or was revoked. `hf auth login`, or set HF_TOKEN"
    if status == 403:
        verb = "write to" if action == "push" else "read"
        propose = ", or propose it with --create-pr (create_pr)" if "create_pr" in said else ""
        return (
            f"your token may not {verb} {repo_id} ({said}): use one with the role write, of an account with "
            f"access{propose}"
        )
    if status == 412:
        return f"somebody else has changed {repo_id} during the push ({said}); nothing of it was committed. Push again"
    if status == 429 or status >= 500:
        return f"the Hub answered {status} ({said}); {again}"
    return f"the Hub refused the {action} of {repo_id} with {status}: {said}"
