"""`rein view`: the file to open, the viewer, and other viewers."""

import sys

import pytest

from rein.cli import main
from rein.cli.run_folder import first_file, how_to_open
from rein.errors import StoreError
from rein.store.hdf5 import HDF5Store
from rein.testing.store import make_trajectory

FAKE = "import sys; print('jupyter', sys.argv[1:])"


@pytest.fixture
def path(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for epoch in (1, 2):
        store.append(make_trajectory(epoch))
    store.close()
    return store.path


@pytest.fixture
def extra(tmp_path, monkeypatch):
    """Install replacements for the modules of the extra, which print their arguments."""
    for name in ("jupyterlab", "jupyterlab_h5web"):
        (tmp_path / "extra" / name).mkdir(parents=True)
        (tmp_path / "extra" / name / "__init__.py").touch()
    (tmp_path / "extra/jupyterlab/__main__.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "extra")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "extra"))


@pytest.fixture
def no_extra(monkeypatch):
    for name in ("jupyterlab", "jupyterlab_h5web"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_first_file_is_learning_curves_or_newest_trajectories(path):
    newest = path / "trajectories" / "000002-000002.h5"
    assert first_file(path) == newest
    (path / "metrics.h5").write_bytes(newest.read_bytes())
    assert first_file(path) == path / "metrics.h5"
    assert first_file(newest) == newest


def test_other_viewers_are_listed_without_the_extra(path, no_extra, capsys):
    main(["view", str(path)])
    text = capsys.readouterr().out
    assert 'pip install "jupyterlab>=4" jupyterlab-h5web' in text
    assert "myhdf5.hdfgroup.org" in text
    assert f"silx view {path}/trajectories/000002-000002.h5" in text
    assert f"h5glance '{path}/my file.h5' (" in how_to_open(path / "my file.h5")


def test_jupyterlab_starts_in_the_run_folder(path, extra, capfd):
    main(["view", str(path), "--no-browser"])
    text = capfd.readouterr().out
    assert "double-click trajectories/000002-000002.h5" in text
    assert f"['--ServerApp.root_dir={path}', '--no-browser']" in text


def test_jupyterlab_starts_in_the_folder_of_a_file(path, extra, capfd):
    main(["view", str(path / "trajectories" / "000001-000001.h5")])
    text = capfd.readouterr().out
    assert "double-click 000001-000001.h5" in text
    assert f"['--ServerApp.root_dir={path}/trajectories']" in text


def test_exit_status_of_jupyterlab_is_returned(path, extra, tmp_path):
    (tmp_path / "extra/jupyterlab/__main__.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit) as ended:
        main(["view", str(path)])
    assert ended.value.code == 3


def test_damaged_file_is_not_opened(path, extra, capfd):
    newest = path / "trajectories" / "000002-000002.h5"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(SystemExit):
        main(["view", str(path)])
    output = capfd.readouterr()
    assert output.out == ""
    assert "was truncated or extended" in output.err


def test_folder_without_files_raises(tmp_path):
    with pytest.raises(StoreError, match="no HDF5 file there"):
        first_file(tmp_path)
