from __future__ import annotations

import ctypes
import mmap
import os
import threading

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)

from ctxflow.host.local_files import OF_LIBRARY
from ctxflow.models import SentenceEncoder, contexts, read_ahead, weight_reading
from ctxflow.models.model_folder import weight_files
from ctxflow.models.transformers import load_language_model
from ctxflow.models.weight_reading import mapped_bytes, on_shared_storage, vllm_loader
from waiting import joined

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WRITERS = {
    "llama": LlamaConfig(vocab_size=515, **SMALL),
    "qwen2-tied": Qwen2Config(vocab_size=515, num_key_value_heads=1, tie_word_embeddings=True, **SMALL),
    "gpt2-tied": GPT2Config(vocab_size=515, n_embd=32, n_layer=2, n_head=2),
}


@pytest.fixture(scope="module", params=["whole", "shards", "bin"])
def layout(request):
    return request.param


@pytest.fixture(scope="module", params=sorted(WRITERS))
def saved(request, layout, causal_lm_folder, tmp_path_factory):
    """A model of random weights, and the folder that it was saved to with a tokenizer."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(f"{request.param}-{layout}")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(WRITERS[request.param]).eval()
    model.save_pretrained(folder, max_shard_size="40KB" if layout == "shards" else "1GB")
    AutoTokenizer.from_pretrained(causal_lm_folder).save_pretrained(folder)
    if layout == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return model, folder


def page_cache(file):
    """How many bytes of a file the machine holds in its page cache."""
    size = os.path.getsize(file)
    pages = -(-size // mmap.PAGESIZE)
    libc, held = ctypes.CDLL(None, use_errno=True), (ctypes.c_ubyte * pages)()
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), held) == 0
    return sum(each & 1 for each in held) * mmap.PAGESIZE


def drop(file):
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_loaded_is_what_was_saved(saved, dtype):
    model, folder = saved
    kind = getattr(torch, dtype)
    loaded = load_language_model(folder, dtype=dtype, device="cpu").model
    expected, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight.to(kind)), name
    tied = [name for name, weight in loaded.named_parameters(remove_duplicate=False)]
    assert len(tied) - len(list(loaded.parameters())) == int(model.config.tie_word_embeddings)
    ids = torch.arange(12)[None]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, plain(ids).logits)


def test_weights_that_keep_their_type_are_the_files_pages_and_others_are_not(saved):
    _, folder = saved
    files = weight_files(folder)
    kept = list(load_language_model(folder, dtype="float32", device="cpu").model.parameters())
    assert mapped_bytes(kept, files) == sum(weight.nbytes for weight in kept)
    changed = load_language_model(folder, dtype="bfloat16", device="cpu").model
    assert mapped_bytes(changed.parameters(), files) == 0


def test_an_encoders_and_a_classifiers_weights_are_mapped_too(tmp_path, causal_lm_folder):
    from transformers import AutoTokenizer

    config = BertConfig(vocab_size=515, num_labels=3, **SMALL)
    torch.manual_seed(2)
    encoder = AutoModel.from_config(config).eval()
    encoder.save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(causal_lm_folder).save_pretrained(tmp_path / "encoder")
    loaded = SentenceEncoder(tmp_path / "encoder", device="cpu").loaded.model
    weights = dict(loaded.named_parameters())
    assert mapped_bytes(weights.values(), weight_files(tmp_path / "encoder")) == sum(w.nbytes for w in weights.values())
    for name, weight in encoder.named_parameters():
        [found] = [weights[own] for own in weights if own.endswith(name)]
        assert torch.equal(found, weight), name
    head = AutoModelForSequenceClassification.from_config(config)
    head.save_pretrained(tmp_path / "head")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "head")
    assert all(map(torch.equal, head.state_dict().values(), again.state_dict().values()))
    assert mapped_bytes(again.parameters(), weight_files(tmp_path / "head"))


def in_huge_pages(file):
    """How many bytes of a file a process that maps it has in huge pages."""
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert all(mapped[start] >= 0 for start in range(0, len(mapped), 4096))
        with open("/proc/self/smaps_rollup") as rollup:
            return next(int(line.split()[1]) << 10 for line in rollup if line.startswith("FilePmdMapped"))


def test_what_was_read_ahead_is_mapped_in_huge_pages_where_the_kernel_has_them(tmp_path):
    file, size = tmp_path / "model.gguf", 32 << 20
    file.write_bytes(os.urandom(size))
    drop(file)
    with open(file, "rb") as opened:
        if page_cache(file) or not weight_reading._populate(opened.fileno(), 0, size) or not in_huge_pages(file):
            pytest.skip("files cannot be dropped from memory, or there are no huge pages for them")
    possible = in_huge_pages(file)
    drop(file)
    for thread in read_ahead(file):
        thread.join()
    assert in_huge_pages(file) >= possible / 2


@pytest.mark.parametrize("huge", [True, False], ids=["huge pages", "no huge pages"])
def test_read_ahead_brings_all_of_a_models_files_into_memory(tmp_path, monkeypatch, huge):
    if not huge:
        monkeypatch.setattr(weight_reading, "_populate", lambda *given: False)
    monkeypatch.setattr("ctxflow.models.weight_reading._PART", 1 << 20)
    (tmp_path / "config.json").write_text("{}")
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(os.urandom((3 << 20) + 5))
    index = ", ".join(f'"{name}": "{name}"' for name in names)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {' + index + "}}")
    other = tmp_path / "pytorch_model.bin"
    other.write_bytes(os.urandom(1 << 20))
    files = [tmp_path / name for name in names]
    for file in [*files, other]:
        drop(file)
    if any(map(page_cache, files)):
        pytest.skip("this disk's files cannot be dropped from memory")
    for thread in read_ahead(tmp_path):
        thread.join()
    assert all(page_cache(file) >= file.stat().st_size for file in files)
    assert not page_cache(other), "a format that is not loaded was read"


def test_a_single_file_is_read_ahead_and_an_odd_model_is_left_to_its_loader(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(1 << 20))
    drop(file)
    for thread in read_ahead(file):
        thread.join()
    assert page_cache(file) >= 1 << 20
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    (broken / "model.safetensors.index.json").write_text("no JSON")
    for name in (broken, tmp_path / "missing", "no such hub id!", "package:not_installed_here"):
        assert read_ahead(name) == []


def test_nothing_is_read_any_more_once_that_was_waited_for(tmp_path, monkeypatch):
    (tmp_path / "weights.bin").write_bytes(bytes(1 << 20))
    begun, may = threading.Event(), threading.Event()

    def read(parts):
        begun.set()
        may.wait()

    monkeypatch.setattr(weight_reading, "_read", read)
    monkeypatch.setattr(weight_reading, "_in_memory", lambda *part: False)
    readers = read_ahead(tmp_path / "weights.bin")
    assert readers and begun.wait()
    waiting = threading.Thread(target=weight_reading.finish_reading)
    waiting.start()
    assert waiting.is_alive()
    may.set()
    joined(waiting)
    assert not any(reader.is_alive() for reader in readers)


def test_more_than_half_of_the_free_memory_is_not_read_ahead(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x" * 4096)
    drop(file)
    if page_cache(file):
        pytest.skip("this disk's files cannot be dropped from memory")
    monkeypatch.setattr("ctxflow.models.weight_reading.free_memory", lambda: 8191)
    assert read_ahead(tmp_path / "model.gguf") == []
    monkeypatch.setattr("ctxflow.models.weight_reading.free_memory", lambda: 8192)
    [thread] = read_ahead(tmp_path / "model.gguf")
    thread.join()
    assert read_ahead(tmp_path / "model.gguf") == [], "what is in memory needs no thread"


def test_a_file_that_goes_or_shrinks_meanwhile_ends_the_readers(tmp_path, monkeypatch):
    monkeypatch.setattr("ctxflow.models.weight_reading._PART", 1 << 16)
    monkeypatch.setattr(threading, "excepthook", lambda given: pytest.fail(str(given.exc_value)))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x" * (8 << 20))
    drop(file)
    threads = read_ahead(file)
    os.truncate(file, 1 << 20)
    file.unlink()
    for thread in threads:
        joined(thread)
        assert not thread.is_alive()


@pytest.mark.parametrize("ready_made", ["generator", "classifier", "encoder", "vllm_generator"])
def test_contexts_begin_to_read_before_they_import_anything(ready_made, monkeypatch):
    happened = []
    monkeypatch.setattr(contexts, "read_ahead", happened.append)
    monkeypatch.setattr(contexts, "built_class", lambda name: lambda model, **settings: happened.append(name))
    recipe = getattr(contexts, ready_made)("folder")
    recipe.function(*recipe.args, **recipe.kwargs)
    assert len(happened) == 2 and happened[0] == "folder"


def test_storage_is_shared_by_its_file_systems_kind(tmp_path):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"

    def shared(kind):
        mounts.write_text(
            f"21 1 0:999 / /proc rw - proc proc rw\n36 35 {number} /a /b\\040c rw - {kind} server:/x rw\n"
        )
        return on_shared_storage(tmp_path, os.fspath(mounts))

    assert all(map(shared, ["nfs4", "lustre", "fuse.sshfs", "fuse", "ceph"]))
    assert not any(map(shared, ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fusectl"]))
    assert not on_shared_storage(tmp_path, os.fspath(tmp_path / "none"))


@pytest.fixture
def shared_model(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    monkeypatch.setattr("ctxflow.models.weight_reading.on_shared_storage", lambda path: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "runai_model_streamer" else None)
    return tmp_path


def test_vllm_streams_from_shared_storage_where_the_user_says_nothing_else(shared_model):
    assert vllm_loader(shared_model, {"dtype": "bfloat16"}) == {"load_format": "runai_streamer"}
    for given in ({"load_format": "auto"}, {"safetensors_load_strategy": "eager"}, {"quantization": "awq"}):
        assert vllm_loader(shared_model, given) == {}


def test_vllm_keeps_its_own_loader_for_what_the_streamer_would_load_otherwise(shared_model, monkeypatch):
    (shared_model / "original").mkdir()
    (shared_model / "original" / "consolidated.safetensors").write_bytes(b"x")
    assert vllm_loader(shared_model, {}) == {}, "the streamer takes every file for the model's"
    (shared_model / "original" / "consolidated.safetensors").unlink()
    (shared_model / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert vllm_loader(shared_model, {}) == {}
    (shared_model / "config.json").write_text("{}")
    monkeypatch.setattr("ctxflow.models.weight_reading.on_shared_storage", lambda path: False)
    assert vllm_loader(shared_model, {}) == {}


def test_a_library_process_tells_how_weights_came(causal_lm_folder, monkeypatch, capfd):
    load_language_model(causal_lm_folder, dtype="float32", device="cpu")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv(OF_LIBRARY, "/scratch")
    load_language_model(causal_lm_folder, dtype="float32", device="cpu")
    said = capfd.readouterr().err
    assert said.startswith("[ctxflow: ") and f"GB of weights of {causal_lm_folder} mapped in " in said
    assert said.count("\n") == 1 and "this machine's disk" in said
    load_language_model(causal_lm_folder, dtype="bfloat16", device="cpu")
    assert "loaded as bfloat16 on cpu in " in capfd.readouterr().err
