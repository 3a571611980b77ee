"""Pushes upload no file from outside the folder, and no secret. Tests of a lying Hub are in
test_hub_boundary.py.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_here import NAME
from safetensors.torch import save_file

from hrm_hf.hub import checkpoint_contents, pull_checkpoint, push_checkpoint, push_space
from hrm_hf.hub.secrets import secret_in


SHA = "0123456789abcdef" * 4


# ---- links ----


@pytest.mark.parametrize("name", ["results.json", "model.safetensors", "README.md", "notes.txt"])
def test_push_rejects_links_out_of_the_folder(name, puzzle, tmp_path):
    (tmp_path / "private.txt").write_text("private")
    if (puzzle / name).exists():
        shutil.move(puzzle / name, tmp_path / "private.txt")
    (puzzle / name).symlink_to(tmp_path / "private.txt")
    if name == "notes.txt":
        contents = checkpoint_contents(puzzle, NAME)
        assert name not in contents.files and "link to a file outside" in contents.left_out[name]
    with pytest.raises(ValueError, match=f"{name} is a link"):
        checkpoint_contents(puzzle, NAME, include=("*.txt",))


@pytest.mark.parametrize("target", ["/etc", "..", "nowhere"])
def test_push_rejects_linked_folders(target, puzzle):
    (puzzle / "eval_more").symlink_to(target)
    assert "is a link to" in checkpoint_contents(puzzle, NAME).left_out["eval_more"]
    with pytest.raises(ValueError, match="eval_more is a link"):
        checkpoint_contents(puzzle, NAME, include=("eval_*",))


def test_space_push_rejects_links_out_of_the_folder(hub, tmp_path):
    space = tmp_path / "space"
    space.mkdir()
    (space / "README.md").write_text("---\nsdk: gradio\n---\n")
    (space / "app.py").write_text("")
    (space / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="passwd is a link"):
        push_space(space, "org/demo")
    assert not hub.storage.repositories


def test_links_within_the_folder_and_those_of_the_cache_are_pushed(hub, puzzle, tmp_path):
    (puzzle / "results.json").write_text("{}")
    (puzzle / "eval_same").mkdir()
    (puzzle / "eval_same" / "results.json").symlink_to("../results.json")
    push_checkpoint(puzzle, NAME)
    assert hub.files(NAME)["eval_same/results.json"] == b"{}"
    snapshot = pull_checkpoint(NAME).path
    assert (snapshot / "model.safetensors").is_symlink()
    push_checkpoint(snapshot, "org/again")
    assert hub.files("org/again")["model.safetensors"] == (puzzle / "model.safetensors").read_bytes()


def test_push_rejects_links_in_a_fake_cache_folder(hub, puzzle, tmp_path):
    fake = tmp_path / "models--x" / "snapshots" / "0"
    fake.parent.mkdir(parents=True)
    shutil.move(puzzle, fake)
    (tmp_path / "models--x" / "blobs").mkdir()
    (tmp_path / "models--x" / "blobs" / "secret").write_text("{}")
    (fake / "results.json").symlink_to("../../blobs/secret")
    with pytest.raises(ValueError, match=r"results\.json is a link"):
        checkpoint_contents(fake, NAME)


# ---- secrets ----

# Each is split into two strings, so that this file contains no complete secret.
SECRETS = {
    "GitHub": "ghp_" + "a1B2c3D4e5F6" * 3, "GitHub, of an app": "ghs_" + "a1B2c3D4e5F6" * 3,
    "GitHub, fine-grained": "github_pat_" + "11ABCDEFG0" * 3 + "_x", "GitLab": "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
    "Slack": "xoxb-" + "123456789012-1234567890123-AbCdEfGhIjKlMnOpQrStUvWx",
    "a webhook of Slack": "https://hooks.slack." + "com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE", "AWS, temporary": "ASIA" + "IOSFODNN7EXAMPLE",
    "AWS, a secret key in YAML": "aws_secret_access_" + "key: wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS, a secret key in .env": "AWS_SECRET_ACCESS_" + "KEY=wJalrXUtnFEMI+K7MDENG+bPxRfiCYzEXAMPLEKY",
    "AWS, a secret key in text": "Secret access " + "key: wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS, in a list of YAML": "- name: SECRET_ACCESS_" + "KEY\n  value: wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS, without signs": "ENV AWS_SECRET_ACCESS_" + "KEY wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS, a token in YAML": "aws_session_" + "token: " + "FwoGZXIvYXdzEBYaDk+/" * 8,
    "Google": "AIza" + "SyA-1234567890abcdefghijklmnopqrstu",
    "JWT": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "a private key": "-----BEGIN RSA PRIV" + "ATE KEY-----",
    "an encrypted key": "-----BEGIN ENCRYPTED PRIV" + "ATE KEY-----",
    "a key of SSH": "-----BEGIN OPENSSH PRIV" + "ATE KEY-----",
    "W&B": "WANDB_API_" + "KEY=" + "0123456789abcdef" * 2 + "01234567",
    "W&B in .netrc": "machine api.wandb" + ".ai\n  login user\n  password " + "0123456789abcdef" * 2 + "01234567",
    "W&B, new": "wandb_" + "v1_" + "a1B2c3D4e5" * 7,
    "a database": "postgresql://me:" + "hunter2@db.example.com/runs",
    "a database, signs in the password": "mysql://me:" + "hunter$2!x@10.0.0.5:3306/runs",
    "JDBC": "jdbc:mysql://db/x?user=me&pass" + "word=hunter2", "Groq": "gsk_" + "a1B2c3D4" * 6,
    "Redis": "redis://:" + "hunter2hunter2@cache:6379/0", "the Hub": "hf_" + "a1B2" * 9,
    "OpenAI": "sk-" + "proj-" + "a1B2c3D4" * 5, "Anthropic": "sk-" + "ant-api03-" + "a1B2c3D4" * 5,
    "npm": "npm_" + "a1B2c3D4e5F6" * 3, "Stripe": "sk_" + "live_" + "a1B2c3D4e5F6a1B2c3D4e5F6",
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + "a1B2c3D4e5" * 8,
}  # fmt: skip


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_found_in_every_file_type(kind, puzzle, tmp_path):
    secret = SECRETS[kind]
    for name, content in {
        "a.json": json.dumps({"logged": f"with {secret} in it"}).encode(),
        "a.md": f"{secret}\n".encode(),
        "a.txt": secret.encode("utf-16"),
        "a.bin": bytes(range(256)) * 2000 + secret.encode() + bytes(range(256)) * 2000,
        "one_line.json": b"[" + b'"word", ' * 40_000 + json.dumps(secret).encode() + b"]",
    }.items():
        assert secret_in(name, content), name
    torch.save({"weights": torch.zeros(3), "note": secret}, tmp_path / "optimizer.pt")
    assert secret_in("optimizer.pt", tmp_path / "optimizer.pt")
    save_file({"weight": torch.zeros(3)}, tmp_path / "a.safetensors", metadata={"note": secret})
    assert secret_in("a.safetensors", tmp_path / "a.safetensors")


PLACES = {
    "a recipe": ("recipe.yaml", {}), "results": ("results.json", {}), "a tokenizer": ("tokenizer_config.json", {}),
    "an included file": ("deploy/settings.ini", {"include": ("deploy/*",)}),
    "included weights": ("other.safetensors", {"include": ("*.safetensors",)}),
    "a state": ("optimizer.pt", {"with_training_state": True}), "the weights": ("model.safetensors", {}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_push_searches_every_source_of_files_for_secrets(place, puzzle, hub):
    name, options = PLACES[place]
    secret = SECRETS["GitHub"]
    (puzzle / name).parent.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        from safetensors.torch import load_file

        weights = load_file(puzzle / "model.safetensors")
        save_file(weights, puzzle / name, metadata={"format": "pt", "notes": json.dumps({"token": secret})})
    elif name.endswith(".pt"):
        torch.save({"note": secret}, puzzle / name)
    else:
        (puzzle / name).write_text(json.dumps({"note": secret}))
    with pytest.raises(ValueError, match=f"{name}: .*GitHub Token") as refused:
        push_checkpoint(puzzle, NAME, **options)
    assert secret not in str(refused.value) and not hub.storage.repositories


@pytest.mark.parametrize("name", [".env", "deploy/prod.env", ".env.local", "deploy/.netrc", "token"])
def test_files_named_like_secrets_are_not_pushed(name, puzzle):
    (puzzle / name).parent.mkdir(exist_ok=True)
    (puzzle / name).write_text("DATABASE_PASSWORD=hunter2\n")
    contents = checkpoint_contents(puzzle, NAME, include=("*",))
    assert name not in contents.files and "may contain a secret" in contents.left_out[name]


def test_push_to_hub_of_a_model_rejects_secrets(hub):
    import every

    model = every.model("hrm_puzzle")
    model.config.note = SECRETS["AWS"]
    with pytest.raises(ValueError, match=r"config.json: .*AWS"):
        model.push_to_hub(NAME)
    assert "config.json" not in hub.files(NAME)


def test_push_to_hub_of_a_trainer_rejects_secrets(hub, tmp_path):
    import tiny_cosmo

    run = tiny_cosmo.trainer(tmp_path / "run", push_to_hub=True, hub_model_id=NAME, max_steps=1)
    run.model.config.note = SECRETS["Slack"]
    with pytest.raises(ValueError, match=r"config.json: .*Slack"):
        run.push_to_hub()
    assert "config.json" not in hub.files(NAME)


def test_secret_across_two_blocks_is_found():
    secret = SECRETS["AWS"].encode()
    for start in range(2**18 - 25, 2**18 + 5):
        assert secret_in("a.log", b"x " * (start // 2) + secret + b" y" * 1000), start


def test_push_without_detect_secrets_warns_and_still_finds_the_users_token(puzzle, monkeypatch):
    from hrm_hf.hub import secrets

    monkeypatch.setattr(secrets, "find_spec", lambda name: None)
    secrets._detectors.cache_clear()
    (puzzle / "results.json").write_text(json.dumps({"note": SECRETS["GitHub"]}))
    assert secrets.NOT_SEARCHED in checkpoint_contents(puzzle, NAME).notes
    monkeypatch.setenv("HF_TOKEN", "of_my_own_for_the_hub")
    (puzzle / "results.json").write_text(json.dumps({"note": "of_my_own_for_the_hub"}))
    with pytest.raises(ValueError, match=r"results.json: .*logged in"):
        checkpoint_contents(puzzle, NAME)
    secrets._detectors.cache_clear()


def test_files_without_secrets_are_pushed(puzzle, tmp_path):
    import every
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    # A byte-level vocabulary of the package's own source, with code, names and all bytes.
    source = sorted(str(file) for file in Path(every.__file__).parents[2].rglob("hrm_hf/**/*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(source[:150], trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert secret_in("tokenizer.json", tmp_path / "tokenizer.json") is None
    for file in source:
        assert secret_in(file, Path(file)) is None, file
    numbers = torch.arange(300_000, dtype=torch.int32).numpy().tobytes()
    assert secret_in("a.bin", numbers) is None
    harmless = "\n".join([
        "highs_and_other_words_of_a_long_name_in_code", "https://huggingface.co/me/model@main",
        "risk-" + "averse-" * 8, "sha256:" + SHA, "git@github.com:me/model.git", "https://user@host/path",
        "wandb_project: key to everything", "hf_" + "x" * 34, "db://$USER:$PASS@h/x", "db://%s:%s@h", "db://{u}:{p}@h",
        f"secret_hash: {SHA[:40]}", "aws_region: us-east-1", "ssh://git@host:22/x", '"eyJ.eyJ.x"',
    ])  # fmt: skip
    assert secret_in("a.md", harmless.encode()) is None
    every.save("hrm_lm", tmp_path / "lm")
    assert checkpoint_contents(tmp_path / "lm", NAME).files and checkpoint_contents(puzzle, NAME).files
