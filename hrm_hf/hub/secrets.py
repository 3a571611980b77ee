"""Search files for tokens, keys and passwords before a push, with detect-secrets.

Only detectors that recognize a secret by its format are used, because detectors of entropy or variable names would
flag every tokenizer. The search is local. It covers only the header of safetensors files, and everything except the
tensors in torch files. Compressed, encrypted or encoded content is not searched.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import get_token
from safetensors import SafetensorError, safe_open

from ..io.usage import install_command


# Name patterns of files that store secrets, possibly in formats that no detector recognizes.
SECRETS_FILES = (
    ".env", ".env.*", "*.env", ".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", "token", "stored_tokens",
    "id_rsa", "id_ecdsa", "id_ed25519", "credentials", "credentials.json",
)  # fmt: skip
NOT_SEARCHED = f"files were not searched for secrets: {install_command('secrets')}"
BLOCK, OVERLAP = 2**18, 2**13  # bytes per block, and bytes that two blocks share (more than the longest secret)
TENSOR = re.compile(r"(^|/)data/\d+$")  # path of a tensor in a torch archive
PRINTABLE = re.compile(rb"[\t\x20-\x7e]{16,}")  # strings long enough to be a secret
# Detectors from detect-secrets. Slow ones only search texts that contain one of the listed words (in lower case).
DETECTORS = {
    "aws.AWSKeyDetector": "akia asia abia acca a3t aws",
    "azure_storage_key.AzureStorageKeyDetector": "",
    "gitlab_token.GitLabTokenDetector": "gl",
    "jwt.JwtTokenDetector": "",
    "mailchimp.MailchimpDetector": "-us",
    "openai.OpenAIDetector": "",
    "private_key.PrivateKeyDetector": "private putty",
    "pypi_token.PypiTokenDetector": "",
    "sendgrid.SendGridDetector": "",
    "slack.SlackDetector": "xox slack.com",
    "square_oauth.SquareOAuthDetector": "sq0csp-",
    "stripe.StripeDetector": "k_live_",
    "telegram_token.TelegramBotTokenDetector": ":aa",
    "twilio.TwilioKeyDetector": "",
}
NO_EXAMPLE = r"(?![xX*]{8})"  # excludes placeholders such as hf_xxxxxxxx
# Secrets that detect-secrets 1.5 misses, such as AWS secret keys without quotes. Negative lookbehinds come after a
# pattern's literal prefix, because `re` searches fast for a literal prefix.
MORE_PATTERNS = {
    "AWS Secret Key": (
        # A name, punctuation, optionally "is" or "value", and a key of 40 mixed characters (digests are longer).
        r"(?i:aws|secret)[\w .-]{0,30}(?:\\n|[^\w/+]){0,12}(?:(?i:is|value)[^\w/+]{1,8})?(?<![\w/+])"
        r"(?=\S{0,39}[0-9])(?=\S{0,39}[a-z])(?=\S{0,39}[A-Z])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]{3}|=)",
        r"(?i:se(?:ssion|curity)[_ -]?token)[^\w/+]{1,12}[A-Za-z0-9/+=]{100,}",
    ),
    "Hugging Face Token": (
        rf"hf_(?<!\whf_){NO_EXAMPLE}[A-Za-z0-9]{{30,}}", r"api_org_(?<!\wapi_org_)[A-Za-z0-9]{30,}",
    ),
    "Private Key": (r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----", r"AGE-SECRET-KEY-1[A-Z0-9]{50,}"),
    "GitHub Token": (rf"gh[pousr]_(?<!\w.{{4}}){NO_EXAMPLE}[A-Za-z0-9]{{36}}", r"github_pat_[A-Za-z0-9_]{22,}"),
    "Google API Key": (
        r"AIza(?<!\wAIza)[0-9A-Za-z_-]{35}", r"GOCSPX-[0-9A-Za-z_-]{28}",
        r"ya29\.[0-9A-Za-z_-]{30,}", r"1//0[0-9A-Za-z_-]{40,}",
    ),
    "Weights & Biases Key": (
        r"wandb_v\d_[A-Za-z0-9_]{40,}",
        r"(?i)wandb[\w .-]{0,20}key[\"']?\s*[:=]\s*[\"']?[0-9a-f]{40}",
        r"(?i)wandb\.ai\b[\s\S]{0,60}\bpassword\s+[0-9a-f]{40}",  # .netrc
    ),
    "API Key": (
        r"sk-(?<!\wsk-)(?=[A-Za-z_-]{0,40}\d)[A-Za-z0-9_-]{32,}",
        r"(?:gsk_|r8_|xai-|dckr_pat_|dop_v1_|shpat_|whsec_|dapi|hvs\.)(?=[a-zA-Z]{0,20}\d)[A-Za-z0-9_-]{24,}",
    ),
    "npm Token": (r"npm_(?<!\wnpm_)[A-Za-z0-9]{36}",),
    "Slack Token": (
        r"xapp-\d-[A-Z0-9]+-\d+-[a-z0-9]{32,}", r"xox[a-z]-[A-Za-z0-9-]{24,}",
        r"hooks\.slack\.com/[a-z]+/\w+/\w+/\w+",
    ),
    "Basic Auth Credentials": (
        r"://[^\s:/@\"'<>{}]{0,64}:(?!\$\w+@|%s@)[^\s/@\"'<>{}]{1,128}@[A-Za-z0-9\[]",
        r"(?i)(?:jdbc:|\b(?:server|host|data source|dbname|uid|user(?: id)?)=)[^\n\"',]{0,200}?"
        r"[;?& ](?:password|pwd)=(?![$%<{])[^\s;&\"'<>{}]{3,}",
    ),
}  # fmt: skip
# These detectors skip texts that contain none of their words.
WORDS = {"AWS Secret Key": "aws secret session", "Weights & Biases Key": "wandb"}


def validate_no_secrets(files: dict[str, Path | bytes]) -> list[str]:
    """Raise ValueError if a file contains a token, a key or a password.

    Without detect-secrets, this only searches for the user's own token and returns a note.
    """
    token = get_token()
    for name, source in files.items():
        if kind := secret_in(name, source, token):
            raise ValueError(
                f"{name}: contains a secret ({kind}); nothing was uploaded. Remove it from the file, and revoke it if "
                "anyone has seen the file. If this is a false alarm, upload the file with `hf upload`"
            )
    return [] if find_spec("detect_secrets") else [NOT_SEARCHED]


def secret_in(name: str, source: Path | bytes, token: str | None = None) -> str | None:
    """Return the kind of secret that a file contains, or None. `token` is the user's own Hub token."""
    with BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as stream:
        for block in _blocks(name, stream, source):
            if token and token.encode() in block:
                return "the token you are logged in with"
            text = b"\n".join(PRINTABLE.findall(block)).decode("ascii")
            small = text.lower()
            for kind, words, detector in _detectors():
                if (not words or any(word in small for word in words)) and any(detector.analyze_string(text)):
                    return kind
    return None


def _blocks(name: str, file: BinaryIO, source: Path | bytes) -> Iterator[bytes]:
    """Yield overlapping blocks of a file's content. Also yield UTF-16 blocks without their zero bytes."""
    for stream in _streams(name, file, source):
        before = b""
        while block := stream.read(BLOCK):
            both = before + block
            yield both
            if both.count(0) * 4 > len(both):
                yield both.replace(b"\0", b"")
            before = block[-OVERLAP:]


def _streams(name: str, file: BinaryIO, source: Path | bytes) -> Iterator[BinaryIO]:
    """Yield streams with the text and metadata of a file, but not its tensors."""
    if name.endswith(".safetensors") and isinstance(source, Path):
        try:
            with safe_open(source, "pt") as opened:
                texts = [*opened.keys(), *_texts_in(opened.metadata() or {})]
            yield BytesIO("\n".join(texts).encode("utf-8", "replace"))
            return
        except SafetensorError:
            pass
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            members = archive.namelist()
            if any(member.endswith("data.pkl") for member in members):  # a torch.save archive
                for member in members:
                    if not TENSOR.search(member):
                        with archive.open(member) as stream:
                            yield stream
                return
    file.seek(0)
    yield file


def _texts_in(metadata: dict[str, str]) -> Iterator[str]:
    """Yield each entry as `key: value`. If a value is a JSON mapping, also yield its unescaped entries."""
    for key, value in metadata.items():
        yield f"{key}: {value}"
        if value.startswith("{"):
            with suppress(ValueError):  # not JSON, so only the value itself is searched
                yield from _texts_in({name: str(inner) for name, inner in json.loads(value).items()})


@cache
def _detectors() -> list[tuple[str, list[str], Any]]:
    """Return (kind of secret, words, detector) tuples. A detector with words runs only if the text has one of them."""
    if not find_spec("detect_secrets"):
        return []
    from detect_secrets.plugins.base import RegexBasedDetector

    found = []
    for kind, patterns in MORE_PATTERNS.items():
        fields = {"secret_type": kind, "denylist": [re.compile(pattern) for pattern in patterns]}
        words = WORDS.get(kind, "").split()
        found.append((kind, words, type("Detector", (RegexBasedDetector,), fields)()))
    for name, words in DETECTORS.items():
        module, _, detector = name.partition(".")
        made = getattr(import_module(f"detect_secrets.plugins.{module}"), detector)()
        found.append((made.secret_type, words.split(), made))
    return found
