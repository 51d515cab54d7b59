"""Whole folders: every file of weights, the index, the configuration, and what lies beside them.

``OUT`` is made as ``OUT.partial`` and gets its name when it is complete. What is in it already, a
killed run left finished: the same command goes on.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .conventions.convention import CONFIG
from .files import Files
from .header import Header, parse_json
from .jobs import Job, Progress, run_jobs
from .manifest import manifest_path
from .storage import check_names
from .summary import Summary
from .writer import beside, check_space, locked, replacing, sync_directory

__all__ = ["MANIFEST", "check_place", "layer_names", "make_folder", "read_config"]

#: What says how a checkpoint is quantized: never copied.
_CONFIGS = (CONFIG, "hf_quant_config.json")
MANIFEST = "blockscale.manifest.json"


#: Output heads that models tie to their embedding, by a tensor that those have which have them.
_TIED_HEADS = {
    "cls.predictions.decoder": "cls.predictions.bias",  # of BERT
    "lm_head.decoder": "lm_head.dense.weight",  # of RoBERTa
    "proj_out": "model.encoder.conv1.weight",  # of Whisper
}


def layer_names(files: Files, tensors: Collection[str]) -> tuple[str, ...]:
    """Layers of these matrices, modules of these stacks of experts, and the output head by its
    usual names: it may have no tensor of its own."""
    found = [head for head, other in _TIED_HEADS.items() if other in files.tensors]
    for name, tensor in files.tensors.items():
        layer, _, part = name.rpartition(".")
        is_matrix = layer and part == "weight" and len(tensor.shape) > 1
        is_stack = layer.endswith("experts") and len(tensor.shape) > 2
        if name in tensors and (is_matrix or is_stack):
            found.append(layer)
    return tuple(dict.fromkeys(["lm_head", *found]))


def read_config(files: Files, argument: str) -> dict[str, Any]:
    """``config.json`` beside the files; empty where there is none. ValueError if damaged.

    What an older ModelOpt says of quantization is in a file of its own.
    """
    config = _read_object(files.folder / CONFIG, argument)
    older = _read_object(files.folder / "hf_quant_config.json", argument).get("quantization")
    if config.get("quantization_config") is None and isinstance(older, dict):
        config["quantization_config"] = {"quant_method": "modelopt", **older}
    return config


def _read_object(path: Path, argument: str) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes(), constants=True)  # Mamba 2 has an Infinity
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{argument}: {path}: {error}; fetch it again") from None
    return content


def make_folder(
    files: Files,
    target: Path,
    config: Mapping[str, Any],
    job: Callable[[str, Path], Job],
    configuration: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Any],
    tell: Callable[[Progress], None],
) -> dict[str, Any]:
    """Make ``target`` with a file of ``job`` for each of ``files``; returns its manifest.

    ``config`` is that of the source, ``configuration`` what is put into it and into other files.
    """
    check_place(files, target)
    others, weights = files.beside()
    if not config and CONFIG in configuration:
        raise ValueError(
            f"source: {files.folder} has no {CONFIG}, which says what the model is; put it there"
        )
    with locked(target):
        work = beside(target, ".partial")
        finished = os.path.lexists(target)
        place = target if finished else work
        jobs = [each for name in files.names if (each := job(name, place / name)).tasks]
        jobs = [replace(each, replaces=not finished) for each in jobs]
        check_names((stored for each in jobs for stored in each.header.tensors), "source")
        texts = _texts(files, jobs, config, configuration)
        copied = _to_copy(others, texts)
        if not finished:
            _make_work(work)
        else:
            _check_finished(target, jobs, texts, copied)
        check_space(target, {each.target: each.header.file_size for each in jobs})
        summary, made = Summary(), []
        for file in run_jobs(files, jobs, tell):
            summary.add(file)
            made.append(file["file"])
        manifest = {**about, "files": made, "left_out": weights, "summary": summary.to_json()}
        if not finished:
            texts[MANIFEST] = json.dumps(manifest, indent=1).encode() + b"\n"
            _write_rest(work, texts, copied)
            files_made = [
                path for each in jobs for path in (each.target, manifest_path(each.target))
            ]
            _sweep(work, {*texts, *copied, *(path.name for path in files_made)})
            os.replace(work, target)
            sync_directory(target.parent)
        return manifest


def check_place(files: Files, target: Path) -> None:
    """ValueError unless ``target`` can be made, or is a folder and not the source."""
    if target.is_file():
        raise ValueError(f"target: {target} is a file; choose another name")
    if not target.name:
        raise ValueError(f"target: {target} has no name of its own; name a folder to be made")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"target: {target.parent} does not exist; make it first")
    source = files.folder.resolve()
    for place in (target.resolve(), beside(target, ".partial").resolve()):
        if place == source or source in place.parents:
            raise ValueError(f"target: {place} is the source, or lies in it; choose another place")
        if place in source.parents:
            raise ValueError(f"target: the source lies in {place}; choose another place")


def _make_work(work: Path) -> None:
    """The folder to work in. ValueError where something is there that was not made here: what is
    half-written in it will be removed."""
    if work.is_dir() and not work.is_symlink():
        marks = ("*.safetensors.journal", "*.safetensors.manifest.json")
        if not any(work.iterdir()) or any(any(work.glob(mark)) for mark in marks):
            return
    if os.path.lexists(work):
        raise ValueError(
            f"target: {work} is in the way, and was not made here; move it away, or choose another "
            "name"
        )
    work.mkdir()


def _check_finished(
    target: Path, jobs: list[Job], texts: Mapping[str, bytes], copied: Mapping[str, Path]
) -> None:
    def has(name: str, content: bytes | None = None) -> bool:
        path = target / name
        return path.is_file() and (content is None or path.read_bytes() == content)

    wrong = [job.target.name for job in jobs if not has(job.target.name)]
    wrong += [name for name, content in texts.items() if not has(name, content)]
    wrong += [
        name
        for name, path in copied.items()
        if not (has(name) and filecmp.cmp(path, target / name, shallow=False))
    ]
    wrong += [MANIFEST] * (not has(MANIFEST))
    if wrong:
        raise ValueError(
            f"target: {target} exists, and {wrong[0]} in it is not what this command makes; remove "
            "it, or choose another name"
        )


def _texts(
    files: Files,
    jobs: list[Job],
    config: Mapping[str, Any],
    configuration: Mapping[str, Mapping[str, Any]],
) -> dict[str, bytes]:
    """Name -> content of what is made anew beside the weights."""
    out = {}
    if config:
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        out[CONFIG] = _json({**plain, **configuration.get(CONFIG, {})})
    out |= {name: _json(content) for name, content in configuration.items() if name != CONFIG}
    if files.index is not None:
        out[files.index] = _json(_index({job.target.name: job.header for job in jobs}))
    return out


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _to_copy(others: Mapping[str, Path], texts: Mapping[str, bytes]) -> dict[str, Path]:
    """What is copied of what lies beside the weights."""
    return {
        name: path
        for name, path in others.items()
        if name not in texts and name not in _CONFIGS and not name.endswith(".manifest.json")
    }


def _sweep(work: Path, made: set[str]) -> None:
    """Remove what a killed run left half-written."""
    for path in work.rglob("*"):
        if path.is_file() and path.relative_to(work).as_posix() not in made:
            path.unlink()


def _write_rest(work: Path, texts: Mapping[str, bytes], others: Mapping[str, Path]) -> None:
    for name, path in others.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(work / name, "target") as out, open(path, "rb") as original:
            shutil.copyfileobj(original, out)
    for name, content in texts.items():
        with replacing(work / name, "target") as out:
            out.write(content)


def _index(headers: Mapping[str, Header]) -> dict[str, Any]:
    places = {name: file for file, header in headers.items() for name in header.tensors}
    size = sum(each.nbytes for header in headers.values() for each in header.tensors.values())
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
