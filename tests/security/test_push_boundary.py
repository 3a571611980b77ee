"""The boundary to a Hub, outwards: no file from outside of the folder, no secret, no path of this machine, no markup.

Referee for cards: markdown-it, which renders Markdown as the Hub does. A Hub that lies is in test_hub_boundary.py.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hub_here import NAME
from markdown_it import MarkdownIt
from safetensors.torch import save_file

from hrm_hf.hub import checkpoint_contents, pull_checkpoint, push_checkpoint, push_space
from hrm_hf.hub.cards import new_card_text, update_model_card
from hrm_hf.hub.secrets import secret_in


SHA = "0123456789abcdef" * 4


# ---- links ----


@pytest.mark.parametrize("name", ["results.json", "model.safetensors", "README.md", "notes.txt"])
def test_a_link_out_of_the_folder_does_not_leave_with_a_push(name, puzzle, tmp_path):
    (tmp_path / "private.txt").write_text("private")
    if (puzzle / name).exists():
        shutil.move(puzzle / name, tmp_path / "private.txt")
    (puzzle / name).symlink_to(tmp_path / "private.txt")
    if name == "notes.txt":
        contents = checkpoint_contents(puzzle, NAME)
        assert name not in contents.files and "link to a file outside" in contents.left_out[name]
    with pytest.raises(ValueError, match=f"{name} is a link to a file outside of the folder.*nothing was uploaded"):
        checkpoint_contents(puzzle, NAME, include=("*.txt",))


@pytest.mark.parametrize("target", ["/etc", "..", "nowhere"])
def test_a_linked_folder_does_not_leave_with_a_push(target, puzzle):
    (puzzle / "eval_more").symlink_to(target)
    assert "is a link to" in checkpoint_contents(puzzle, NAME).left_out["eval_more"]
    with pytest.raises(ValueError, match="eval_more is a link to"):
        checkpoint_contents(puzzle, NAME, include=("eval_*",))


def test_a_link_out_of_a_space_stops_its_push(hub, tmp_path):
    space = tmp_path / "space"
    space.mkdir()
    (space / "README.md").write_text("---\nsdk: gradio\n---\n")
    (space / "app.py").write_text("")
    (space / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="passwd is a link to a file outside of the folder"):
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


def test_a_folder_that_only_looks_like_the_cache_gets_no_more(hub, puzzle, tmp_path):
    fake = tmp_path / "models--x" / "snapshots" / "0"
    fake.parent.mkdir(parents=True)
    shutil.move(puzzle, fake)
    (tmp_path / "models--x" / "blobs").mkdir()
    (tmp_path / "models--x" / "blobs" / "secret").write_text("{}")
    (fake / "results.json").symlink_to("../../blobs/secret")
    with pytest.raises(ValueError, match=r"results.json is a link to a file outside"):
        checkpoint_contents(fake, NAME)


@pytest.mark.parametrize("name", ["a\x1b[2J.png", "a\n.png", "a\u202e.png"])
def test_a_name_that_no_pull_would_take_is_not_pushed(name, puzzle):
    (puzzle / name).write_bytes(b"a picture")
    with pytest.raises(ValueError, match="has a name that is not pulled again") as refused:
        checkpoint_contents(puzzle, NAME)
    assert str(refused.value).isprintable()


# ---- secrets ----

# In two parts each, lest this file holds any.
SECRETS = {
    "GitHub": "ghp_" + "a1B2c3D4e5F6" * 3, "GitHub, of an app": "ghs_" + "a1B2c3D4e5F6" * 3,
    "GitHub, fine-grained": "github_pat_" + "11ABCDEFG0" * 3 + "_x", "GitLab": "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
    "Slack": "xoxb-" + "123456789012-1234567890123-AbCdEfGhIjKlMnOpQrStUvWx",
    "a webhook of Slack": "https://hooks.slack." + "com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE", "AWS, temporary": "ASIA" + "IOSFODNN7EXAMPLE",
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
    "Redis": "redis://:" + "hunter2hunter2@cache:6379/0", "the Hub": "hf_" + "a1B2" * 9,
    "OpenAI": "sk-" + "proj-" + "a1B2c3D4" * 5, "Anthropic": "sk-" + "ant-api03-" + "a1B2c3D4" * 5,
    "npm": "npm_" + "a1B2c3D4e5F6" * 3, "Stripe": "sk_" + "live_" + "a1B2c3D4e5F6a1B2c3D4e5F6",
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + "a1B2c3D4e5" * 8,
}  # fmt: skip


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_stops_a_push_whatever_file_it_is_in(kind, puzzle, tmp_path):
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
def test_secrets_are_looked_for_wherever_a_push_takes_files_from(place, puzzle, hub):
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
    with pytest.raises(ValueError, match=f"{name} holds a token of GitHub; nothing was uploaded") as refused:
        push_checkpoint(puzzle, NAME, **options)
    assert secret not in str(refused.value) and not hub.storage.repositories


@pytest.mark.parametrize("name", [".env", "deploy/.netrc", "token", ".git-credentials"])
def test_a_file_of_secrets_stays_behind_by_its_name(name, puzzle):
    (puzzle / name).parent.mkdir(exist_ok=True)
    (puzzle / name).write_text("DATABASE_PASSWORD=hunter2\n")
    contents = checkpoint_contents(puzzle, NAME, include=("*",))
    assert name not in contents.files and "may hold a secret" in contents.left_out[name]


def test_push_to_hub_of_a_model_looks_for_secrets_too(hub):
    import every

    model = every.model("hrm_puzzle")
    model.config.note = SECRETS["AWS"]
    with pytest.raises(ValueError, match=r"config.json holds an access key of AWS"):
        model.push_to_hub(NAME)
    assert "config.json" not in hub.files(NAME)


def test_a_trainer_looks_for_secrets_too(hub, tmp_path):
    import tiny_cosmo

    run = tiny_cosmo.trainer(tmp_path / "run", push_to_hub=True, hub_model_id=NAME, max_steps=1)
    run.model.config.note = SECRETS["Slack"]
    with pytest.raises(ValueError, match=r"config.json holds a token of Slack"):
        run.push_to_hub()
    assert "config.json" not in hub.files(NAME)


def test_a_secret_that_lies_between_two_blocks_is_found(monkeypatch):
    secret = SECRETS["AWS"].encode()
    for start in range(2**18 - 25, 2**18 + 5):
        assert secret_in("a.log", b"x " * (start // 2) + secret + b" y" * 1000), start


def test_what_is_no_secret_is_pushed(puzzle, tmp_path):
    import every
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    # A byte-level vocabulary of the package's own source: code, names in it, all bytes.
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
        "wandb_project: key to everything", "ssh://git@host:22/x", '"eyJ.eyJ.x"',
    ])  # fmt: skip
    assert secret_in("a.md", harmless.encode()) is None
    every.save("hrm_lm", tmp_path / "lm")
    assert checkpoint_contents(tmp_path / "lm", NAME).files and checkpoint_contents(puzzle, NAME).files


# ---- paths of this machine ----


def test_paths_of_this_machine_stay_at_home(hub, puzzle, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "data_path": f"{tmp_path}/data/sudoku", "output_dir": "/scratch/jane/runs/it", "tokenizer_name": "~jane/tok",
        "model_name_or_path": "org/base", "train_data": ["/home/jane/a.txt,/home/jane/b.txt", "allenai/c4:en"],
        "build_data": "arc /home/jane/arc --out=/home/jane/built --url https://example.org/a/b",
        "run_name": str(puzzle),
        "data_cache_dir": "C:\\Users\\jane\\cache", "logging_dir": "file:///home/jane/logs", "stop": "/", "seed": 7,
    }  # fmt: skip
    (puzzle / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    state = {"best_model_checkpoint": f"{puzzle}/checkpoint-5", "global_step": 5, "log_history": [{"loss": 0.5}]}
    (puzzle / "trainer_state.json").write_text(json.dumps(state))
    (puzzle / "results.json").write_text(json.dumps({"files": {"/home/jane/test.csv": 0.5}, "speed": "5 tokens/s"}))
    (puzzle / "eval_more").mkdir()
    (puzzle / "eval_more" / "results.json").write_text(json.dumps({"data": "/home/jane/test.csv"}))
    before = {file: file.read_bytes() for file in puzzle.rglob("*") if file.is_file()}
    result = push_checkpoint(puzzle, NAME)
    files = hub.files(NAME)
    for name, content in files.items():
        assert b"jane" not in content and str(tmp_path).encode() not in content, name
    assert yaml.safe_load(files["recipe.yaml"]) == {
        "data_path": "data/sudoku", "output_dir": "it", "tokenizer_name": "tok", "model_name_or_path": "org/base",
        "train_data": ["a.txt,b.txt", "allenai/c4:en"], "build_data": "arc arc --out=built --url https://example.org/a/b",
        "run_name": "puzzle", "data_cache_dir": "cache", "logging_dir": "logs", "stop": "/", "seed": 7,
    }  # fmt: skip
    assert json.loads(files["trainer_state.json"]) == {**state, "best_model_checkpoint": "puzzle/checkpoint-5"}
    assert json.loads(files["results.json"]) == {"files": {"test.csv": 0.5}, "speed": "5 tokens/s"}
    assert any(note.startswith("recipe.yaml: without the place of files on this machine") for note in result.notes)
    assert {file: file.read_bytes() for file in puzzle.rglob("*") if file.is_file()} == before


def test_the_place_of_an_adapters_base_stays_at_home(tmp_path):
    save_file({"lora_A": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "/home/jane/models/base", "target_modules": "/a/b"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "README.md").write_text(
        "---\nlibrary_name: peft\nbase_model: /home/jane/models/base\n---\nan adapter\n"
    )
    files = checkpoint_contents(tmp_path, NAME).files
    assert json.loads(files["adapter_config.json"]) == {**config, "base_model_name_or_path": "base"}
    assert b"jane" not in files["README.md"]


def test_the_state_of_training_goes_to_the_byte_since_its_manifest_counts_them(puzzle):
    from hrm_hf.hub.manifests import write_manifest

    (puzzle / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "/home/jane/checkpoint-5"}))
    write_manifest(puzzle)
    whole = checkpoint_contents(puzzle, NAME, with_training_state=True)
    assert whole.files["trainer_state.json"] == puzzle / "trainer_state.json"
    assert b"jane" not in checkpoint_contents(puzzle, NAME).files["trainer_state.json"]


# ---- cards ----

MARKUP = {
    "a script": "<script>alert(1)</script>", "a picture": '<img src=x onerror="alert(1)">',
    "a link": "[x](https://evil.example)", "a picture in Markdown": "![x](https://evil.example/x.png)",
    "the end of a table": "x |\n\n<script>alert(1)</script>\n\n", "metadata": "x\n---\nlicense: mit\n---\n",
    "code": "`<script>`", "the end of code": 'x"\n```\n<script>alert(1)</script>\n',
    "a program": 'x"); import os; os.abort(); ("', "the end of our part": "<!-- end of hrm_hf results --><script>",
    "a terminal escape": "x\x1b[2Jy",
}  # fmt: skip


def assert_plain(text: str) -> None:
    """A card has no HTML besides our two kinds of comments, no link to elsewhere, and its own headings."""
    metadata, _, body = text[4:].partition("\n---\n")
    assert isinstance(yaml.safe_load(metadata), dict)
    tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(body)
    inline = [child for token in tokens for child in token.children or []]
    html = [token.content for token in [*tokens, *inline] if token.type.startswith("html")]
    assert all(part.strip().startswith("<!--") and "<script" not in part for part in html), html
    addresses = [child.attrs.get("href") or child.attrs.get("src") for child in inline if child.attrs]
    assert not [address for address in addresses if address and "evil" in address]
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings[1:] == ["Use", "Training", "Training data", "Results", "Architecture", "Limits", "License"]
    assert "\x1b" not in text
    for token in tokens:
        if token.type == "fence" and token.info == "python":
            compile(token.content, "card", "exec")
            assert "os.abort()" not in token.content or '\\"); import os' in token.content


@pytest.mark.parametrize("markup", MARKUP)
def test_names_are_words_in_a_card_and_nothing_else(markup, saved_puzzle, tmp_path):
    name = MARKUP[markup]
    folder = Path(shutil.copytree(saved_puzzle, tmp_path / name.replace("/", "\u2215").strip()))
    recipe = {
        "preset": name, "seed": name, "optim": name, "lr_scheduler_type": name, "train_data": [name, f"/data/{name}"],
        "model_name_or_path": f"/models/{name}", "load_in": name, "lora_rank": 4, "data_path": name,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "results.json").write_text(json.dumps({"hardware": name, "versions": {name: name}, "steps": 5}))
    assert_plain(new_card_text(folder))
    update_model_card(folder, {name: 0.5, "loss": 1.0}, name, name, {name: name}, parameters=5)
    update_model_card(folder, {"loss": 0.5}, name, name, {name: name}, parameters=5)
    assert_plain((folder / "README.md").read_text())
    contents = checkpoint_contents(folder, NAME, license=name)
    assert_plain(contents.files["README.md"].decode())


@pytest.mark.parametrize("markup", MARKUP)
def test_names_of_parameters_and_tasks_are_words_in_a_card(markup, tmp_path):
    import every

    name = MARKUP[markup]
    cosmo = every.save("hrm_cosmo", tmp_path / "cosmo")
    config = json.loads((cosmo / "config.json").read_text())
    config |= {"derived_s8": False}
    config["target_names"] = [name, *config["target_names"][1:]]
    config["id2label"] = dict(enumerate(config["target_names"]))
    (cosmo / "config.json").write_text(json.dumps(config))
    assert_plain(new_card_text(cosmo))
