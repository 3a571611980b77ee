"""Tokens, keys and passwords in what is about to be uploaded, found by detect-secrets.

Of its detectors those are used that know a secret by its form; those that guess by entropy or by the name of a
variable would see secrets in every tokenizer. What it lacks is added as detectors of its own kind. Nothing is sent
anywhere: the library's check whether a secret is still valid is not used.

A file is read in blocks, so its size does not matter. Of safetensors only the header is looked at, of files of torch
all but the tensors: those are numbers. What is compressed, encrypted or encoded is not seen.
"""

import json
import re
import struct
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from huggingface_hub import get_token

from .errors import printable


# Files whose whole purpose is to hold some, in forms that no detector knows.
SECRETS_FILES = (
    ".env", ".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", "token", "stored_tokens", "id_rsa",
    "id_ecdsa", "id_ed25519", "credentials.json",
)  # fmt: skip
BLOCK, OVERLAP = 2**18, 2**13  # bytes looked at a time, and those that two blocks share: no secret is longer
LARGEST_HEADER = 100 * 2**20  # bytes of a safetensors header, as the format allows
TENSOR = re.compile(r"(^|/)data/\d+$")  # in a file of torch
# Bytes that are no printable characters become line ends, which end a secret.
READABLE = bytes(c if 32 <= c < 127 or c == 9 else 10 for c in range(256))
# What is found, in words -> detector of the library, and where its patterns are slow, words (in small letters) of
# which a text must have one for it to look.
LIBRARY = {
    "an access key of AWS": ("aws.AWSKeyDetector", "akia asia abia acca a3t aws"),
    "a storage key of Azure": ("azure_storage_key.AzureStorageKeyDetector", ""),
    "an address with a password": ("basic_auth.BasicAuthDetector", ""),
    "a token of GitLab": ("gitlab_token.GitLabTokenDetector", ""),
    "a JSON web token": ("jwt.JwtTokenDetector", ""),
    "a key of Mailchimp": ("mailchimp.MailchimpDetector", "-us"),
    "a key of OpenAI": ("openai.OpenAIDetector", ""),
    "a private key": ("private_key.PrivateKeyDetector", "private putty"),
    "a token of PyPI": ("pypi_token.PypiTokenDetector", ""),
    "a key of SendGrid": ("sendgrid.SendGridDetector", ""),
    "a token of Slack": ("slack.SlackDetector", "xox slack.com"),
    "a secret of Square": ("square_oauth.SquareOAuthDetector", "sq0csp-"),
    "a key of Stripe": ("stripe.StripeDetector", "k_live_"),
    "a token of Telegram": ("telegram_token.TelegramBotTokenDetector", ":aa"),
    "a key of Twilio": ("twilio.TwilioKeyDetector", ""),
}
# What the library (1.5) lacks: what is found, in words -> words as above, and patterns. What must not stand before a
# pattern is said after its first letters, by which it is then searched fast; of what follows nothing is asked, since
# in a pickle a letter does.
LACKING = {
    "a token of the Hub": ("", r"hf_(?<!\whf_)[A-Za-z0-9]{30,}", r"api_org_(?<!\wapi_org_)[A-Za-z0-9]{30,}"),
    # Encrypted ones, for example; without the dashes the words may be in any text.
    "a private key": ("private", r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"),
    # The library's own also finds one in the name highs_and_other_words_of_a_long_name_in_code.
    "a token of GitHub": ("", r"gh[pousr]_(?<!\w.{4})[A-Za-z0-9]{36}", r"github_pat_[A-Za-z0-9_]{22,}"),
    "a key of Google": ("", r"AIza(?<!\wAIza)[0-9A-Za-z_-]{35}", r"GOCSPX-[0-9A-Za-z_-]{28}"),
    "a key of Weights & Biases": (
        "wandb",
        r"wandb_v\d_[A-Za-z0-9_]{40,}",
        r"(?i)wandb[\w .-]{0,20}key[\"']?\s*[:=]\s*[\"']?[0-9a-f]{40}",
        r"(?i)wandb\.ai\b[\s\S]{0,60}\bpassword\s+[0-9a-f]{40}",  # .netrc
    ),
    "an API key": ("", r"sk-(?<!\wsk-)[A-Za-z0-9_-]{32,}"),
    "a token of npm": ("", r"npm_(?<!\wnpm_)[A-Za-z0-9]{36}"),
    "a token of Slack": ("", r"xapp-\d-[A-Z0-9]+-\d+-[a-z0-9]{32,}", r"xox[a-z]-[A-Za-z0-9-]{24,}"),
    # The library's stops at signs that passwords have, and wants the name of a user.
    "an address with a password": ("", r"://[^\s:/@\"'<>{}]{0,64}:[^\s/@\"'<>{}]{3,128}@[A-Za-z0-9\[]"),
}


def validate_no_secrets(files: dict[str, Path | bytes]) -> None:
    """Raises ValueError for a file that holds a token, a key or a password.

    Args:
        files: name in the repository -> file or content.
    """
    token = get_token()
    for name, source in files.items():
        if kind := secret_in(name, source, token):
            raise ValueError(
                f"{printable(name)} holds {kind}; nothing was uploaded. Delete it from the file, and revoke it if the "
                "file was shown to anyone. If it only looks like a secret, `hf upload` sends a file as it is"
            )


def secret_in(name: str, source: Path | bytes, token: str | None = None) -> str | None:
    """Returns the kind of secret in a file, None if none is found.

    Args:
        token: that nobody may see, whatever its form.
    """
    with BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as stream:
        for block in _blocks(name, stream):
            if token and token.encode() in block:
                return "the token you are logged in with"
            if kind := _kind(block.translate(READABLE).decode("ascii")):
                return kind
    return None


def _blocks(name: str, file: BinaryIO) -> Iterator[bytes]:
    """The parts of a file that are searched: blocks that overlap, and of some the same without the zeros of UTF-16."""
    for stream in _streams(name, file):
        before = b""
        while block := stream.read(BLOCK):
            both = before + block
            if _has_text(both):
                yield both
            if both.count(0) * 4 > len(both):
                yield both.replace(b"\0", b"")
            before = block[-OVERLAP:]


def _streams(name: str, file: BinaryIO) -> Iterator[BinaryIO]:
    """A file without its tensors."""
    length = _header_length(file) if name.endswith(".safetensors") else None
    if length is not None:
        header = json.loads(file.read(length))
        # Parsed, so that no text is written with escapes; each text on a line of its own.
        yield BytesIO("\n".join(texts_in(header)).encode("utf-8", "replace"))
        return
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            members = archive.namelist()
            if any(member.endswith("data.pkl") for member in members):  # written by torch.save
                for member in members:
                    if not TENSOR.search(member):
                        with archive.open(member) as stream:
                            yield stream
                return
    file.seek(0)
    yield file


def _has_text(block: bytes) -> bool:
    """Whether 16 characters in a row can be read: fewer are no secret, and among numbers they are rare."""
    readable = (values := np.frombuffer(block, np.uint8)) >= 32
    readable &= values < 127
    for step in (1, 2, 4, 8):  # after each, a place says so of twice as many characters
        readable = readable[:-step] & readable[step:]
    return bool(readable.any()) or len(block) < 16


def _header_length(stream: BinaryIO) -> int | None:
    """Bytes of a safetensors header, None where there is no whole one."""
    start = stream.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
    if length > LARGEST_HEADER:
        return None
    try:
        json.loads(stream.read(length))
    except (ValueError, RecursionError):
        return None
    stream.seek(8)
    return length


def texts_in(values: object) -> Iterator[str]:
    """Every text in JSON values; the keys, too, and where one has a text for its value both as `key: value`."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{key}: {value}" if isinstance(value, str) else str(key)
            yield from texts_in(value)
    elif isinstance(values, list):
        for value in values:
            yield from texts_in(value)
    elif isinstance(values, str):
        yield values


def _kind(text: str) -> str | None:
    """Returns the kind of secret in a text. Some patterns are slow, the search for a word that they need is not."""
    small = text.lower()
    for kind, words, detector in _detectors():
        if (not words or any(word in small for word in words)) and any(detector.analyze_string(text)):
            return kind
    return None


@cache
def _detectors() -> list[tuple[str, list[str], Any]]:
    """Name of each kind of secret, words of which a text must have one, and its detector."""
    from detect_secrets.plugins.base import RegexBasedDetector

    found = []
    for kind, (words, *patterns) in LACKING.items():
        fields = {"secret_type": kind, "denylist": [re.compile(pattern) for pattern in patterns]}
        found.append((kind, words.split(), type("Lacking", (RegexBasedDetector,), fields)()))
    for kind, (name, words) in LIBRARY.items():
        module, _, detector = name.partition(".")
        found.append((kind, words.split(), getattr(import_module(f"detect_secrets.plugins.{module}"), detector)()))
    return found
