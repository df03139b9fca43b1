"""From a card to a verified local folder of safetensors: download, GGUF conversion, integrity.

Nothing is evaluated before every tensor that the index names is known to be whole, and nothing
that could run code (pickle weights, remote code) is ever opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from oasis_eval.errors import CheckpointError, MissingExtraError, OasisError, SpecError
from oasis_eval.paths import cache_folder
from oasis_eval.spec import DirSource, HubSource, ModelCard, NamedSource, PackageSource

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_INDEX = "model.safetensors.index.json"
_SIDE_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
_READ_BY_LOADER = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
_DESCRIBES = "training.json"
"""What `train` says of a run, wall times included; it decides nothing."""
_CONVERTER_VERSION = 1
_HEADER_LIMIT = 100 << 20


def locate(card: ModelCard) -> Path:
    """Return what the card points to: a checkpoint folder or a GGUF file, downloaded if need be.

    Raises:
        CheckpointError: It is not there.
        MissingExtraError: The package that carries the weights is not installed.
    """
    source = card.source
    if isinstance(source, HubSource):
        return _download(source)
    if isinstance(source, PackageSource):
        return _in_package(source)
    if isinstance(source, NamedSource):
        raise CheckpointError(f"{card.name}: the card of an imported result says no place to load")
    path = Path(source.path)
    expected = "folder" if isinstance(source, DirSource) else "GGUF file"
    there = path.is_dir() if isinstance(source, DirSource) else path.is_file()
    if not there:
        raise CheckpointError(f"{card.name}: {path} is no {expected}")
    return path


def digest(path: Path) -> str:
    """Return the SHA-256 over every file that decides what the model computes.

    Args:
        path: Checkpoint folder or GGUF file.

    Raises:
        CheckpointError: A file cannot be read.
    """
    total = hashlib.sha256()
    for file in [path] if path.is_file() else _loader_files(path):
        total.update(f"{file.name}\0".encode())
        with as_checkpoint_error(f"{file}: cannot be read"), file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def as_safetensors(path: Path, *, content: str) -> Path:
    """Return a folder that transformers can load: `path` itself, or a GGUF file's conversion.

    A conversion takes minutes; it is kept in the cache under the file's content and done once.

    Args:
        path: What `locate` returned.
        content: Its `digest`.

    Raises:
        CheckpointError: The GGUF file cannot be read.
    """
    if path.is_dir():
        return path
    return cached_folder(
        f"gguf/v{_CONVERTER_VERSION}-{content[:32]}",
        lambda folder: _convert_gguf(path, folder),
        origin=str(path),
    )


def cached_folder(name: str, build: Callable[[Path], None], *, origin: str) -> Path:
    """Return a folder of the cache that is either whole or not there.

    Args:
        name: Relative to the cache; says what the content depends on.
        build: Fills the empty folder it is given; called only where the cache lacks the folder.
        origin: What it is made from, for messages.

    Raises:
        CheckpointError: It cannot be stored.
    """
    target = cache_folder() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"{origin}: conversion could not be stored: {error}") from error
    try:
        build(work)
        with contextlib.suppress(FileExistsError):
            work.rename(target)
    except OSError as error:
        if not target.is_dir():  # another process may have finished the same conversion
            raise CheckpointError(f"{origin}: conversion could not be stored: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def replace_folder(out: Path, new: Path, *, old: Path) -> None:
    """Put `new` in the place of `out`, which goes to `old` and comes back if that fails."""
    if not out.exists():
        new.rename(out)
        return
    out.rename(old)
    try:
        new.rename(out)
    except OSError:
        old.rename(out)
        raise


def verify(folder: Path) -> None:
    """Check that a folder holds one complete safetensors checkpoint.

    transformers goes on without a word where a side file cannot be read; its end tokens are lost.

    Raises:
        CheckpointError: One line naming the file or tensor that is missing, cut off or unsafe.
    """
    for name in _SIDE_FILES:
        if (folder / name).is_file():
            _check_json(folder / name)
    shards = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not shards and not (folder / _INDEX).is_file():
        pickles = [file.name for pattern in _PICKLES for file in folder.glob(pattern)]
        if pickles:
            raise CheckpointError(
                f"{folder}: only pickle weights ({pickles[0]}), which can run code when they are "
                "read; convert them to safetensors first"
            )
        raise CheckpointError(f"{folder}: no *.safetensors file")
    found: dict[str, str] = {}
    for shard in shards:
        for name in _tensor_names(shard):
            found[name] = shard.name
    if (folder / _INDEX).is_file():
        for name, shard_name in _weight_map(folder / _INDEX).items():
            if not (folder / shard_name).is_file():
                raise CheckpointError(f"{folder}: shard {shard_name} is missing (index names it)")
            if found.get(name) != shard_name:
                raise CheckpointError(f"{folder}: tensor {name} is not in {shard_name}")
        return
    if len(shards) > 1 and not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder}: {len(shards)} shards but no {_INDEX}")


@contextlib.contextmanager
def as_checkpoint_error(what: str) -> Iterator[None]:
    """Turn what a library says of a file that it cannot read into a `CheckpointError`.

    Args:
        what: Beginning of the message: the file or folder, and what was wanted of it.

    Raises:
        CheckpointError: One line, from any error by which transformers, tokenizers (which raises
            bare `Exception`), safetensors and gguf report a bad file.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    reported = (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError),
        *(struct.error, SafetensorError, StrictDataclassError),
    )
    try:
        yield
    except BaseException as error:
        if isinstance(error, OasisError) or not (
            isinstance(error, reported) or type(error) is Exception
        ):
            raise
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"{what}: {text}") from error


def _check_json(path: Path) -> None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, found {type(value).__name__}")


def _loader_files(folder: Path) -> list[Path]:
    files = {file for pattern in _READ_BY_LOADER for file in folder.glob(pattern)}
    return sorted(file for file in files if file.is_file() and file.name != _DESCRIBES)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors index") from error
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: 'weight_map' is not a mapping")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: {name} points outside the folder: {shard!r}")
    return weight_map


def _tensor_names(path: Path) -> list[str]:
    """Read a safetensors header and check it against the file's size.

    Raises:
        CheckpointError: The file is empty, cut off, or not safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise CheckpointError(f"{path}: {size} bytes, cut off or not safetensors")
        try:
            header = json.loads(file.read(length))
            tensors = {name: item for name, item in header.items() if name != "__metadata__"}
            end = max((int(item["data_offsets"][1]) for item in tensors.values()), default=0)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CheckpointError(f"{path}: header is not safetensors") from error
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path}: {size} bytes, its header needs {8 + length + end}: the file is incomplete"
        )
    return list(tensors)


# --- sources ----------------------------------------------------------------------------------


def _download(source: HubSource) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            source.repo, revision=source.revision, allow_patterns=list(_READ_BY_LOADER)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        cause = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{source.repo}@{source.revision} could not be downloaded: {cause}; give a local "
            "folder, or check the name, the network and `hf auth login`"
        ) from error
    return Path(folder)


def _in_package(source: PackageSource) -> Path:
    # find_spec does not import the package, whose own dependencies may be absent on purpose.
    try:
        spec = importlib.util.find_spec(source.package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(source.package, source.install)
    if source.assemble is not None:
        return _assemble(source)
    folders = [Path(place) for place in spec.submodule_search_locations]
    pattern = source.file or "*.gguf"
    files = sorted(
        file for folder in folders for file in folder.rglob("*") if fnmatch(file.name, pattern)
    )
    if len(files) != 1:
        raise CheckpointError(f"package {source.package}: {len(files)} files match {pattern!r}")
    return files[0]


def _assemble(source: PackageSource) -> Path:
    module, _, function = (source.assemble or "").partition(":")
    if module.split(".")[0] != source.package or not function:
        raise SpecError(
            f"'assemble' must be '{source.package}:FUNCTION', found {source.assemble!r}"
        )
    target = cache_folder() / "assembled" / f"{source.package}.gguf"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        return Path(getattr(importlib.import_module(module), function)(target))
    except ImportError as error:
        raise MissingExtraError(error.name or source.package, source.install) from error
    except (AttributeError, OSError, ValueError) as error:
        raise CheckpointError(f"package {source.package}: {error}") from error


def _convert_gguf(path: Path, folder: Path) -> None:
    """Dequantize a GGUF file to float32 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with as_checkpoint_error(f"{path}: GGUF cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    # transformers marks the model as quantized though its weights are plain by now.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        with contextlib.suppress(AttributeError):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_invented_tokens(folder / "tokenizer.json", model.get_input_embeddings().num_embeddings)


def _drop_invented_tokens(path: Path, num_embeddings: int) -> None:
    """Take back special tokens that transformers adds to a vocabulary which has not got them."""
    if not path.is_file():
        return
    settings = json.loads(path.read_text(encoding="utf-8"))
    added = settings.get("added_tokens", [])
    settings["added_tokens"] = [token for token in added if token["id"] < num_embeddings]
    path.write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
