"""分片的检查点：每个进程只写自己手里的那一份，用 torch.distributed.checkpoint（DCP）。

一份检查点是一个小文件加一个文件夹：`last.pt` 里是张量之外的一切（步数、选项、随机数……），
以及分片文件夹的名字与其中每个文件的摘要；张量在 `shards-…/` 里，DCP 的格式。
次序是：写进临时文件夹 → 每个文件落盘、算摘要 → 文件夹改名 → 才原子地换上新的 `last.pt`。
任何时刻被杀，`last.pt` 指的都是一个完整的文件夹；没有人指的文件夹以后删掉。

DCP 存的是整个张量与各块的位置，与切法无关：几个进程存的都可以由另外几个读回来，`read` 拼成
与单个文件相同的字典。Q、K、V 在这里总是三个矩阵，张量并行才切得开。
这里**不**异步存盘：后台的线程要与训练同时做集体通信，还要整份的内存副本；而「存好了没有」晚一步
才知道，发散时的「最后一个好的检查点」、被抢占前的最后一存、best 与 previous 的次序就都要跟着改。
DCP 的索引（.metadata）是 pickle：读它只认数据类，别的一律拒绝，与 weights_only=True 一样。
"""

import hashlib
import os
import pickle
import secrets
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from experiments.loop.parallel import deal
from experiments.ranks.world import World
from model import GPT, GPTConfig
from tokens.errors import UserError
from tokens.files import describe_write_error, fsync_path

PREFIX = "shards-"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW 的两个矩
INDEX = ".metadata"  # DCP 的索引文件
SAFE = {  # 索引里会出现的类；多一个也不认
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float32"),
}  # fmt: skip


# ---------------------------------------------------------------- 名字：与单个文件的互相换


def split_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """融合的 qkv 拆成 q、k、v（视图）；输出头与词嵌入共享，不另存。"""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("attn.qkv.weight"):
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                found[name.replace("qkv.weight", f"qkv.{part}.weight")] = piece
        elif name != "head.weight":
            found[name] = tensor
    return found


def join_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`split_names` 的逆：三个矩阵按行接回去。"""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("attn.qkv.q.weight"):
            parts = [tensors[name.replace(".q.", f".{part}.")] for part in "qkv"]
            found[name.replace(".q.weight", ".weight")] = torch.cat(parts)
        elif not name.endswith(("attn.qkv.k.weight", "attn.qkv.v.weight")):
            found[name] = tensor
    return found


def meta_model(config: GPTConfig) -> GPT:
    """只有名字与形状、不占内存的模型。"""
    with torch.device("meta"):
        return GPT(config)


def parameter_names(config: GPTConfig) -> list[str]:
    """优化器里参数的次序：先是衰减的（矩阵与词嵌入），再是不衰减的，与 `parameter_groups` 相同。"""
    parameters = dict(meta_model(config).named_parameters())
    return sorted(parameters, key=lambda name: parameters[name].dim() < 2)


def shard_names(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """要写进分片的每个张量（DTensor，就地）：权重，以及更新过之后的两个矩。"""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = parameter
        for moment in MOMENTS if optimizer.state[parameter] else ():
            found[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return found


# ---------------------------------------------------------------- 写


class Writer(dcp.FileSystemWriter):
    """DCP 写文件的那一半；索引里不留这台机器的路径。"""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def file_digest(path: Path) -> str:
    """文件的摘要，十六进制（BLAKE2b）。"""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def write(world: World, folder: Path, step: int, tensors: dict[str, Tensor]) -> dict:
    """每个进程写自己的那一份；返回要记在 `last.pt` 里的 {"folder", "files"}，每个进程都得到。

    写不下、没有权限、各机器没有共用这个文件夹时，每个进程都抛同一个 `UserError`，不留下东西。
    """
    name = world.on_master(lambda: f"{PREFIX}{step:08d}-{secrets.token_hex(4)}")
    temporary = folder / f".{name}.tmp"
    try:
        files = write_files(world, temporary, tensors)
        world.on_master(lambda: publish_folder(temporary, folder / name, files))
    except UserError:
        if world.master:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return {"folder": name, "files": files}


def write_files(world: World, temporary: Path, tensors: dict[str, Tensor]) -> dict[str, list]:
    """写，并算每个文件的 [字节数, 摘要]：各进程算自己写的那些，索引由 0 号算。"""

    def mine() -> dict[str, list]:
        try:
            dcp.save(tensors, storage_writer=Writer(temporary, sync_files=True))
            paths = sorted(temporary.glob(f"__{world.rank}_*"))
            paths += [temporary / INDEX] if world.master else []
            return {path.name: [path.stat().st_size, file_digest(path)] for path in paths}
        except (OSError, RuntimeError, dcp.CheckpointException) as error:
            raise UserError(explain(error, temporary)) from error

    return {name: entry for found in world.gather(world.together(mine)) for name, entry in
            found.items()}  # fmt: skip


def explain(error: BaseException, path: Path) -> str:
    """DCP 把各进程的错误包成一个：取出第一个，换成一句话。"""
    causes = getattr(error, "failures", {None: (error, None)})
    rank, (cause, _) = next(iter(causes.items()))
    where = "" if rank is None else f"{rank} 号进程："
    return where + (describe_write_error(cause, path) or f"{type(cause).__name__}：{cause}")


def publish_folder(temporary: Path, target: Path, files: dict[str, list]) -> None:
    """文件都齐了才落盘、改名。"""
    if missing := [name for name in files if not (temporary / name).exists()]:
        raise UserError(
            f"{temporary.parent} 里看不到别的机器写的 {missing[0]}：分片的检查点要写在各机器"
            "共用的文件夹里；请换一个 --out-dir。"
        )
    fsync_path(temporary)
    os.replace(temporary, target)
    fsync_path(target.parent)


# ---------------------------------------------------------------- 读


class SafeUnpickler(pickle.Unpickler):
    """只认 `SAFE` 里的类：索引文件改不成一段会执行的代码。"""

    def find_class(self, module: str, name: str) -> object:
        if name not in SAFE.get(module, ()):
            raise pickle.UnpicklingError(f"索引里有不该有的 {module}.{name}")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """DCP 读文件的那一半；张量由它以 weights_only=True 读，索引由 `SafeUnpickler`。"""

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        with open(Path(self.path) / INDEX, "rb") as file:
            return SafeUnpickler(file).load()


def locate(pointer: Path, shards: dict) -> Path:
    """`pointer`（last.pt）所指的分片文件夹；移到 old-N 的途中被杀，它还在上一层。"""
    beside = pointer.parent / shards["folder"]
    above = pointer.parent.parent / shards["folder"]
    return above if above.exists() and not beside.exists() else beside


def problem_with(folder: Path, files: dict[str, list]) -> str:
    """缺文件、长度或摘要不对时的一句话；完好是空串。"""
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.exists():
            return f"{folder} 里缺少 {name}"
        if path.stat().st_size != size or file_digest(path) != digest:
            return f"{path} 的内容与摘要不符：文件没有写完，或在写完之后被改动、损坏了"
    return ""


def load_in_place(folder: Path, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """把分片读进 `tensors`（就地）；DTensor 只读自己的那一份，切法不必与存的时候相同。

    `alone` 为假时是集体操作，每个进程都要调用。
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(tensors, storage_reader=Reader(folder), no_dist=alone)


def load_whole(folder: Path, state: dict) -> dict:
    """分片拼成与单个文件相同的内容：{"model": …, "optimizer": [state_dict]}；一个进程单独读。"""
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in Reader(folder).read_metadata().state_dict_metadata.items()
    }
    load_in_place(folder, tensors, alone=True)

    def named(kind: str) -> dict[str, Tensor]:
        some = {name.removeprefix(f"{kind}."): tensor for name, tensor in tensors.items()
                if name.startswith(f"{kind}.")}  # fmt: skip
        return join_names(some)

    config = GPTConfig(**state["model_config"])
    weights, moments = named("model"), {moment: named(moment) for moment in MOMENTS}
    weights["head.weight"] = weights["embed.weight"]
    names = parameter_names(config) if moments["exp_avg"] else []
    entries = {
        i: {"step": torch.tensor(float(state["updates"])),
            **{moment: moments[moment][name] for moment in MOMENTS}}
        for i, name in enumerate(names)
    }  # fmt: skip
    matrices = sum(p.dim() >= 2 for p in meta_model(config).parameters())
    count = len(parameter_names(config))
    members = (list(range(matrices)), list(range(matrices, count)))
    groups = [settings | {"params": some}
              for settings, some in zip(state["groups"], members, strict=True)]  # fmt: skip
    return {"model": {name: weights[name] for name in meta_model(config).state_dict()},
            "optimizer": [{"state": entries, "param_groups": groups}]}  # fmt: skip


# ---------------------------------------------------------------- 优化器的状态


def optimizer_summary(optimizer: torch.optim.Optimizer) -> dict:
    """张量之外的优化器状态：更新了几次，两组参数各自的超参数。"""
    entries = list(optimizer.state.values())
    groups = [{k: v for k, v in group.items() if k != "params"}
              for group in optimizer.param_groups]  # fmt: skip
    return {"updates": int(entries[0]["step"]) if entries else 0, "groups": groups}


def restore_moments(
    model: GPT, optimizer: torch.optim.Optimizer, state: dict, folder: Path | None, world: World
) -> None:
    """把检查点的两个矩装进切开的优化器，每个进程都要调用。

    `folder` 给出时权重与矩都从分片就地读，各读各的；否则来自 0 号进程的 `state`，由它分下去。
    """
    entries = state["optimizer"][0]["state"] if world.master and not folder else {}
    updates = world.on_master(
        lambda: state["updates"] if folder else int(entries[0]["step"]) if entries else 0
    )
    for parameter in model.parameters() if updates else ():
        step = torch.tensor(float(updates), device=parameter.device)  # fused 要它在同一个设备上
        optimizer.state[parameter] = {
            "step": step, **{moment: torch.zeros_like(parameter) for moment in MOMENTS}
        }  # fmt: skip
    if folder:
        load_in_place(folder, shard_names(model, optimizer))
        return
    names = dict(enumerate(parameter_names(model.config)))
    for moment in MOMENTS if updates else ():
        full = split_names({names[i]: entry[moment] for i, entry in entries.items()})
        targets = {name: optimizer.state[p][moment] for name, p in model.named_parameters()}
        deal(full, targets, world)
