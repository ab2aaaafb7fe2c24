"""`ltm embed`: the same rows whoever does the work, none lost, none twice."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import ltm
import within
from ltm.cli import main
from ltm.data.reading import ahead
from ltm.data.sources import find_parts
from ltm.deployment import embedding, tables as tables_module
from ltm.deployment.export import Export
from ltm.deployment.settings import EmbedSettings
from ltm.deployment.tables import Tables
from many import Deadly, encoded, pixels, save_network, write_shard, write_shards

pytestmark = pytest.mark.slow

SOAK = int(os.environ.get("LTM_SOAK_ROWS", "5000"))


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_network(tmp_path_factory.mktemp("embedding") / "run")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("shards"), 3, 20, broken=(7, 30))


@pytest.fixture(scope="module")
def expected(network: Path, shards: str, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    output = tmp_path_factory.mktemp("expected")
    result = ltm.embed(network, shards, output, batch_size=8, device="cpu")
    assert (result.images, result.unreadable, result.files) == (60, 2, 3)
    assert "60 images, 2 unreadable" in str(result)
    return rows(output)


def rows(output: Path) -> pa.Table:
    return pq.read_table(output / "parquet")


# --- The predictor -------------------------------------------------------------------------------


def test_a_batch_of_anything_becomes_a_batch(network: Path) -> None:
    predictor = ltm.BatchPredictor(network, ("embedding", "logits", "top5"), device="cpu", top=2)
    predictor = pickle.loads(pickle.dumps(predictor))
    array, png = pixels(1), encoded(3)
    images = [array, array.transpose(2, 0, 1), png, {"bytes": png}, b"torn", None]
    found = predictor({"image": images, "id": list("abcdef")})
    assert found["id"] == list("abcdef")
    assert found["embedding"].dtype == np.float16
    assert found["embedding"].shape == (6, 64)
    assert (found["embedding"][0] == found["embedding"][1]).all()
    assert (found["logits"][2] == found["logits"][3]).all()
    assert [error is None for error in found["error"]] == [True] * 4 + [False] * 2
    assert "not a readable image" in found["error"][4]
    assert np.isnan(found["logits"][4:]).all()
    assert (found["indices"][:4, 0] == found["logits"][:4].argmax(1)).all()
    assert (found["indices"][4:] == -1).all()
    model = ltm.load(network).eval()
    with torch.no_grad():
        known = model.pretrained_cfg
        inputs = torch.from_numpy(array.transpose(2, 0, 1))[None] / 255
        mean, std = (torch.tensor(known[name])[:, None, None] for name in ("mean", "std"))
        logits = model((inputs - mean) / std)
    np.testing.assert_allclose(found["logits"][:1], logits, atol=1e-4)


def test_a_predictor_says_what_it_cannot_do(network: Path, exported: Export) -> None:
    file = exported.folder / "model.onnx"
    with pytest.raises(ValueError, match="output is 'boxes'; choose from embedding, logits, top5"):
        ltm.BatchPredictor(network, "boxes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype is 'half'; choose from auto, float32"):
        ltm.BatchPredictor(network, dtype="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"output is embedding, but .* gives scores"):
        ltm.BatchPredictor(file).load()
    with pytest.raises(ValueError, match="batch has no column 'image' among picture"):
        ltm.BatchPredictor(network, device="cpu")({"picture": [b""]})
    headless = ltm.BatchPredictor(save_network(network.parent / "bare", num_classes=0), "top5")
    with pytest.raises(ValueError, match="it has no classes to predict"):
        headless.load()


def test_an_onnx_file_answers_as_its_network(exported: Export) -> None:
    images = np.stack([pixels(number).transpose(2, 0, 1) for number in range(3)])
    file = ltm.BatchPredictor(exported.folder / "model.onnx", "logits", device="cpu")
    found = file({"image": images})["logits"]
    spec = file.loaded.information.spec
    inputs = (torch.from_numpy(images) / 255 - spec.mean[0]) / spec.std[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, exported.model(inputs), atol=1e-3)


def test_dask_takes_a_predictor_into_its_partitions(network: Path) -> None:
    dask = pytest.importorskip("dask")
    dataframe = pytest.importorskip("dask.dataframe")
    pandas = pytest.importorskip("pandas")
    predictor = ltm.BatchPredictor(network, "top5", device="cpu", top=1)
    frame = pandas.DataFrame({"id": range(6), "image": [encoded(2 * n) for n in range(6)]})

    def predict(part: Any) -> Any:
        found = predictor(part.to_dict("list"))
        return pandas.DataFrame({"id": found["id"], "label": found["indices"][:, 0]})

    meta = {"id": "int64", "label": "int64"}
    with dask.config.set({"dataframe.convert-string": False}):  # bytes are no text
        parts = dataframe.from_pandas(frame, npartitions=2)
        labels = parts.map_partitions(predict, meta=meta).compute(scheduler="threads")
    alone = predictor({"image": list(frame["image"])})
    assert labels["label"].tolist() == alone["indices"][:, 0].tolist()


@pytest.mark.parametrize("decode", [False, True])
def test_datasets_maps_a_predictor(decode: bool, network: Path) -> None:
    datasets = pytest.importorskip("datasets")
    images = [{"bytes": encoded(2 * number), "path": None} for number in range(6)]
    column = datasets.Image(decode=decode)
    rows = datasets.Dataset.from_dict({"id": list("abcdef"), "image": images})
    predictor = ltm.BatchPredictor(network, ("embedding", "top5"), device="cpu", top=1)
    found = rows.cast_column("image", column).map(predictor, batched=True, batch_size=4)
    alone = predictor({"image": images})
    assert found["id"][:] == list("abcdef")
    assert found["error"][:] == [None] * 6
    for name in ("embedding", "indices"):
        np.testing.assert_allclose(np.array(found[name][:]), alone[name], atol=1e-3)


# --- Rows ----------------------------------------------------------------------------------------


def test_rows_have_what_is_promised(expected: pa.Table) -> None:
    assert expected["id"].to_pylist() == [f"{number:06d}" for number in range(60)]
    kinds = {field.name: str(field.type) for field in expected.schema}
    assert kinds["embedding"] == "fixed_size_list<element: halffloat>[64]"
    assert kinds["indices"] == "fixed_size_list<element: int32>[5]"
    bad = expected.take([7]).to_pylist()[0]
    assert bad["path"].endswith("a-000.tar/000007.npy")
    assert "not a readable array" in bad["error"]
    assert bad["embedding"] is bad["classes"] is None
    assert expected["error"].null_count == 58


def _archive(place: Path, contents: dict[str, bytes]) -> str:
    with zipfile.ZipFile(place / "images.zip", "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return str(place / "images.zip")


def _parquet(place: Path, contents: dict[str, bytes]) -> str:
    columns = {"key": list(contents), "jpg": list(contents.values())}
    pq.write_table(pa.table(columns), place / "images.parquet", row_group_size=2)
    return str(place / "images.parquet")


def _list(place: Path, contents: dict[str, bytes]) -> str:
    paths = [str(place / "images" / "train" / name) for name in contents]
    (place / "images.txt").write_text("\n".join(paths))
    return str(place / "images.txt")


SOURCES = {
    "folder": lambda place, _: str(place / "images"),
    "zip": _archive,
    "parquet": _parquet,
    "list": _list,
    "hf": lambda place, _: f"hf:{place / 'images'}",
    "shapes": lambda *_: "shapes:classes=2,size=48,images=5",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_images_come_from_anywhere(kind: str, network: Path, tmp_path: Path) -> None:
    if kind == "hf":
        pytest.importorskip("datasets")
    contents = {f"{number}.png": encoded(number) for number in range(5)}
    folder = tmp_path / "images" / "train"
    folder.mkdir(parents=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    inputs = SOURCES[kind](tmp_path, contents)
    ltm.embed(network, inputs, tmp_path / "out", device="cpu", shard_rows=2, top=0)
    found = rows(tmp_path / "out")
    assert found.num_rows == 5
    assert found["error"].null_count == 5
    assert len(list((tmp_path / "out" / "parquet").iterdir())) == (1 if kind == "parquet" else 3)
    if kind != "shapes":
        alone = ltm.BatchPredictor(network, device="cpu")({"image": list(contents.values())})
        embeddings = np.array(found["embedding"].to_pylist(), np.float16)
        np.testing.assert_allclose(embeddings, alone["embedding"], atol=1e-3)


def test_a_damaged_shard_is_a_row(network: Path, tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", {"1.png": encoded(0), "2.json": b"{}", "3.png": b""})
    empty = write_shard(tmp_path / "b.tar", {})
    cut = tmp_path / "c.tar"
    cut.write_bytes(shard.read_bytes()[:6000])
    ltm.embed(network, [str(shard), str(empty), str(cut)], tmp_path / "out", device="cpu")
    errors = rows(tmp_path / "out")["error"].to_pylist()
    assert errors[0] is None
    assert "but no image" in errors[1]
    assert "there are no images in this shard" in errors[3]
    assert "c.tar is not a readable tar file" in errors[4]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("nowhere --run RUN", "nowhere: there is no such image, folder"),
        ("no-{00..01}.tar --run RUN", "2 of 2 shards are missing, no-00.tar first"),
        ("empty --run RUN", "there are no images in empty"),
        ("bad.parquet --run RUN", "bad.parquet is not a readable Parquet file"),
        ("text.parquet --run RUN", "has no column of image bytes among words"),
        ("empty --run nowhere", "run is nowhere: there is no such folder"),
        ("empty --run RUN --device cuda:77", "device is cuda:77"),
        ("empty --run RUN --batch-size 0", "batch_size is 0"),
        ("- --run RUN --devices 2", "standard input is read once, in one process"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    options: str, sentence: str, network: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but no more")
    pq.write_table(pa.table({"words": ["a"]}), tmp_path / "text.parquet")
    words = options.replace("RUN", str(network)).split()
    assert main(["embed", *words, "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_predictions_may_be_parquet(network: Path, shards: str, tmp_path: Path, capsys) -> None:
    words = ["predict", shards, "--run", str(network), "--top", "2", "--device", "cpu"]
    assert main([*words, "--format", "parquet", "--output", str(tmp_path / "out")]) == 0
    found = rows(tmp_path / "out")
    assert found.column_names == ["id", "path", "indices", "probabilities", "classes", "error"]
    assert main(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("indices") for line in lines] == found["indices"].to_pylist()
    assert main([*words, "--resume"]) == 2
    assert "--resume goes with --format parquet" in capsys.readouterr().err


# --- Going on ------------------------------------------------------------------------------------


def test_a_run_goes_on_where_it_was_stopped(
    network: Path, shards: str, expected: pa.Table, tmp_path: Path, capsys
) -> None:
    words = ["embed", shards, "--run", str(network), "--output", str(tmp_path), "--device", "cpu"]
    assert main(words) == 0
    (tmp_path / "metrics.json").unlink()
    (tmp_path / "parquet" / "part-00001.parquet").unlink()
    (tmp_path / "parquet" / ".part-00001.parquet-x").write_bytes(b"half")
    before = (tmp_path / "parquet" / "part-00000.parquet").stat().st_mtime_ns
    assert main(words) == 2, "without --resume nothing of another run is touched"
    assert main([*words, "--resume"]) == 0
    assert "20 images" in capsys.readouterr().out
    assert rows(tmp_path).equals(expected)
    assert (tmp_path / "parquet" / "part-00000.parquet").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "metrics.json",
        *(f"part-0000{number}.parquet" for number in range(3)),
    ]
    assert main([*words, "--resume", "--top", "2"]) == 2
    assert "written with other settings (top)" in capsys.readouterr().err


def _of_another_program(path: Path, **metadata: str) -> None:
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(metadata), path)


def _spoil_the_footer(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-100] + b"\xff" * 92 + content[-8:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        _spoil_the_footer,
        lambda path: _of_another_program(path, **{"ltm.run": "no JSON"}),
        lambda path: _of_another_program(path, **{"ltm.run": "[]"}),
    ],
)
def test_a_damaged_file_is_named(
    damage: Callable[[Path], Any], network: Path, shards: str, tmp_path: Path
) -> None:
    """Some were tracebacks of pyarrow, or a sentence that named no file."""
    ltm.embed(network, shards, tmp_path, device="cpu")
    damage(tmp_path / "parquet" / "part-00001.parquet")
    sentence = r"parquet/part-00001\.parquet is not a readable file of embeddings; delete it"
    with pytest.raises(ValueError, match=sentence):
        ltm.embed(network, shards, tmp_path, device="cpu", resume=True)


@pytest.mark.parametrize("how", [{"overwrite": True}, {"resume": True}])
def test_numbers_are_there_only_with_all_files(
    how: dict[str, bool], network: Path, shards: str, tmp_path: Path, monkeypatch
) -> None:
    """A run that stopped early left the metrics of the one before."""
    ltm.embed(network, shards, tmp_path, device="cpu")
    (tmp_path / "parquet" / "part-00000.parquet").unlink()
    submit = ltm.BatchPredictor.submit

    def stopped(self: Any, batch: Any) -> Any:
        if 1 in batch["part"]:
            os.kill(os.getpid(), signal.SIGINT)
        return submit(self, batch)

    monkeypatch.setattr(ltm.BatchPredictor, "submit", stopped)
    (tmp_path / "parquet" / "part-00001.parquet").unlink()
    assert ltm.embed(network, shards, tmp_path, device="cpu", **how).interrupted  # type: ignore[arg-type]
    assert not (tmp_path / "metrics.json").exists()


def test_ctrl_c_waits_for_one_batch(
    network: Path, shards: str, tmp_path: Path, monkeypatch
) -> None:
    """It waited for two: the next batch was begun before anybody looked."""
    submit, begun = ltm.BatchPredictor.submit, []

    def pressed(self: Any, batch: Any) -> Any:
        begun.append(batch)
        os.kill(os.getpid(), signal.SIGINT)
        return submit(self, batch)

    monkeypatch.setattr(ltm.BatchPredictor, "submit", pressed)
    assert ltm.embed(network, shards, tmp_path, device="cpu", batch_size=10).interrupted
    assert len(begun) == 1


def test_rows_may_come_twice_and_in_any_order(tmp_path: Path) -> None:
    tables = Tables(tmp_path, {})
    batches = [
        {
            "part": np.zeros(2, int),
            "place": np.array(places),
            "part_rows": np.full(2, 4),
            "id": [str(place) for place in places],
            "error": [None, None],
        }
        for places in ([2, 3], [2, 3], [1, 0])
    ]
    with closing(tables):
        assert [tables.add(batch) for batch in batches] == [2, 0, 2]
    assert rows(tmp_path)["id"].to_pylist() == ["0", "1", "2", "3"]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch) -> None:
    """A thread writes it; what it raises must not be lost."""
    full = OSError(28, "No space left on device")

    def write_bytes(*_: object) -> None:
        raise full

    monkeypatch.setattr(tables_module, "write_bytes", write_bytes)
    row = {name: np.array([0]) for name in ("part", "place")} | {"part_rows": np.array([1])}
    tables = Tables(tmp_path, {})
    assert tables.add(row | {"id": ["0"], "error": [None]}) == 1
    with pytest.raises(OSError, match="No space left"):
        tables.close()
    assert tables.files == 0


def test_the_next_item_is_made_while_this_one_is_in_use() -> None:
    made = [threading.Event() for _ in range(3)]

    def items() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number
        raise ValueError("there are no more")

    coming = ahead(items())
    assert next(coming) == 0
    assert made[1].wait(timeout=10)
    assert not made[2].is_set()
    assert [next(coming), next(coming)] == [1, 2]
    with pytest.raises(ValueError, match="there are no more"):
        next(coming)


def test_parts_are_known_before_their_images_are_looked_for(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", {"1.png": encoded(0)})
    (key,) = (part.key for part in find_parts([str(shard)]))
    write_shard(shard, {"1.png": encoded(0), "2.png": encoded(1)})
    assert next(find_parts([str(shard)])).key != key


COMMAND = [sys.executable, "-m", "ltm", "embed"]


@pytest.mark.exhaustive
def test_a_killed_run_goes_on(network: Path, tmp_path: Path) -> None:
    """SIGKILL as soon as there is a file; the rows are those of a run that was not killed."""
    pattern = write_shards(tmp_path / "shards", 8, 50)
    whole = tmp_path / "whole"
    ltm.embed(network, pattern, whole, device="cpu", batch_size=10)
    words = [pattern, "--run", str(network), "--device", "cpu", "--batch-size", "10"]
    output = tmp_path / "out"
    process = subprocess.Popen([*COMMAND, *words, "--output", str(output)])
    while not list(output.glob("parquet/part-*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    ltm.embed(network, pattern, output, device="cpu", batch_size=10, resume=True)
    assert rows(output).equals(rows(whole))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow(network: Path, tmp_path: Path, monkeypatch) -> None:
    """`LTM_SOAK_ROWS` says over how many rows (`make soak`)."""
    shard = write_shard(tmp_path / "a.tar", {f"{n:04d}.npy": encoded(1, "npy") for n in range(250)})
    sizes: list[int] = []
    add = Tables._write
    monkeypatch.setattr(Tables, "_write", lambda *words: (add(*words), sizes.append(resident())))
    settings = {"device": "cpu", "batch_size": 125}
    ltm.embed(network, [str(shard)] * (SOAK // 250), tmp_path / "out", **settings)
    third = len(sizes) // 3
    grown = (max(sizes[-third:]) - max(sizes[third : 2 * third])) / 2**20
    print(f"{SOAK} rows: {grown:.1f} MiB more in the last third than in the second")
    assert rows(tmp_path / "out").num_rows == SOAK // 250 * 250
    assert grown < 16


# --- Several processes ---------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_two_processes_write_the_rows_of_one(
    network: Path, shards: str, expected: pa.Table, tmp_path: Path
) -> None:
    words = [shards, "--run", str(network), "--output", str(tmp_path), "--device", "cpu"]
    done = subprocess.run([*COMMAND, *words, "--devices", "2"], check=False)
    assert done.returncode == 0
    assert rows(tmp_path).equals(expected)
    assert json.loads((tmp_path / "metrics.json").read_text())["images"] == 60


@pytest.mark.exhaustive
def test_two_processes_go_on_after_one_was_killed(network: Path, tmp_path: Path) -> None:
    """They waited for one another for ever: the launcher's store held the addresses of the dead."""
    pattern = write_shards(tmp_path / "shards", 6, 20)
    predictor = Deadly(str(network), ("embedding", "top5"), device="cpu", batch_size=10)
    predictor.marker = str(tmp_path / "killed")
    settings = EmbedSettings(devices=2, batch_size=10)
    with within.seconds(300):
        embedding.write_tables(predictor, pattern, tmp_path / "out", settings)
    assert Path(predictor.marker).exists()
    assert sorted(rows(tmp_path / "out")["id"].to_pylist()) == [f"{n:06d}" for n in range(120)]


@pytest.mark.exhaustive
def test_an_error_of_one_process_ends_the_run(network: Path, shards: str, tmp_path: Path) -> None:
    """All were started again three times, and then none of them said why."""
    (tmp_path / "parquet").mkdir()
    (tmp_path / "parquet" / "part-00001.parquet").write_bytes(b"torn")
    with (
        within.seconds(300),
        pytest.raises(ValueError, match=r"^\S+part-00001\.parquet is not a readable file of emb"),
    ):
        ltm.embed(network, shards, tmp_path, device="cpu", devices=2, resume=True)


@pytest.mark.exhaustive
def test_ctrl_c_ends_all_processes(network: Path, tmp_path: Path) -> None:
    """As a terminal presses it, in all of them. torch's launcher gave a traceback and code 1."""
    pattern = write_shards(tmp_path / "shards", 200, 20)
    words = [pattern, "--run", str(network), "--output", str(tmp_path / "out"), "--device", "cpu"]
    call = [*COMMAND, *words, "--devices", "2"]
    with subprocess.Popen(
        call, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        while not list(tmp_path.glob("out/parquet/part-*")):
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        pressed = time.monotonic()
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait() == 130
        assert time.monotonic() - pressed < 5
    assert "ltm: stopped by Ctrl-C" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("device", "devices", "resources", "expected"),
    [
        ("auto", None, {"CPU": 64.0, "GPU": 4.0}, (4, 1)),
        ("cuda", None, {"CPU": 64.0, "GPU": 4.0}, (4, 1)),
        ("cuda", 2, {"CPU": 64.0, "GPU": 4.0}, (2, 1)),
        ("cpu", None, {"CPU": 64.0, "GPU": 4.0}, (1, 0)),
        ("auto", 3, {"CPU": 64.0}, (3, 0)),
        ("auto", None, {"CPU": 64.0}, (1, 0)),
    ],
)
def test_the_gpus_of_a_cluster_count_and_not_those_of_its_head(
    device: str, devices: int | None, resources: dict[str, float], expected: tuple[int, int]
) -> None:
    pytest.importorskip("ray")
    from ltm.deployment.on_ray import place_actors

    predictor = ltm.BatchPredictor("nowhere", device=device)
    assert place_actors(predictor, devices, resources) == expected


def test_ray_refuses_a_device_that_it_cannot_give() -> None:
    pytest.importorskip("ray")
    from ltm.deployment.on_ray import place_actors

    file = ltm.BatchPredictor("model.onnx", "logits")
    assert place_actors(file, None, {"GPU": 4.0}) == (1, 0), "a file runs on CPUs unless told"
    assert place_actors(file.on("tensorrt"), None, {"GPU": 4.0}) == (4, 1)
    for device, sentence in {
        "cuda": "device is cuda, but no node of the Ray cluster has a GPU",
        "cuda:1": "device is cuda:1, but Ray deals the GPUs out",
        "gpu": "device is gpu: on Ray it is one of auto, cpu, cuda",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            place_actors(ltm.BatchPredictor("nowhere", device=device), None, {"CPU": 8.0})


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:9", "ray://127.0.0.1:9", "banana"])
def test_a_cluster_that_is_not_there_is_one_sentence_and_2(
    address: str, network: Path, tmp_path: Path, capsys
) -> None:
    """`auto` ended in a traceback, and at an address with a port Ray tried for many minutes."""
    pytest.importorskip("ray")
    (tmp_path / "0.png").write_bytes(encoded(0))
    words = [str(tmp_path), "--run", str(network), "--output", str(tmp_path / "out")]
    assert main(["embed", *words, "--ray", address]) == 2
    error = capsys.readouterr().err
    assert f"ray is {address}, which cannot be joined" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_head_of_a_cluster_needs_no_gpu(network: Path, tmp_path: Path, monkeypatch) -> None:
    """`--device cuda` was refused there, before any actor was asked for."""
    jobs: list[embedding.Job] = []

    def run_on_ray(job: embedding.Job, say: Any) -> embedding.EmbedResult:
        jobs.append(job)
        return embedding.EmbedResult(
            folder=tmp_path, images=1, unreadable=0, files=1, skipped=0, seconds=1.0
        )

    monkeypatch.setattr(embedding, "_run_on_ray", run_on_ray)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ltm.embed(network, tmp_path, tmp_path / "out", ray="auto", device="cuda")
    (job,) = jobs
    assert job.predictor.device == "cuda"
    assert job.known.loaded.device.type == "cpu"


RAY = """
import sys
import ray
from ltm.deployment import embedding, on_ray
from ltm.deployment.settings import EmbedSettings
from many import Deadly

def refuse(part):
    raise AssertionError("the driver has looked into a part")

pattern, run, output, marker, gpus = sys.argv[1:]
embedding.images_of = on_ray.images_of = refuse  # here; the workers import their own
ray.init(address="local", num_cpus=2, num_gpus=int(gpus), log_to_driver=False)
device, devices = ("auto", None) if int(gpus) else ("cpu", 2)
predictor = Deadly(run, ("embedding", "top5"), device=device, batch_size=50)
predictor.marker = marker
settings = EmbedSettings(ray="local", devices=devices, batch_size=50)
embedding.write_tables(predictor, pattern, output, settings, say=print)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kill", ["none", "kill", "gpus"])
def test_ray_writes_the_rows_of_one_process(kill: str, network: Path, tmp_path: Path) -> None:
    """2,000 images, two actors; one of them is killed in the middle, or they have Ray's GPUs."""
    pytest.importorskip("ray")
    pattern = write_shards(tmp_path / "shards", 10, 200, broken=(77, 1234))
    ltm.embed(network, pattern, tmp_path / "one", device="cpu", batch_size=50)
    marker = tmp_path / "killed"
    if kill != "kill":
        marker.touch()
    gpus = "2" if kill == "gpus" else "0"  # there are none, but Ray believes it
    words = [pattern, str(network), str(tmp_path / "two"), str(marker), gpus]
    paths = f"{Path(__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", RAY, *words],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    assert f"2 actors {'with a GPU each' if kill == 'gpus' else 'on CPUs'}" in done.stdout
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert two.num_rows == 2000
    for name in ("id", "path", "error"):
        assert two[name].equals(one[name])
    first = [None if row is None else row[0] for row in one["indices"].to_pylist()]
    assert [None if row is None else row[0] for row in two["indices"].to_pylist()] == first
    read = [row is not None for row in one["embedding"].to_pylist()]
    embeddings = [np.array(t.filter(read)["embedding"].to_pylist(), float) for t in (one, two)]
    np.testing.assert_allclose(*embeddings, atol=1e-3)
