"""The real kubectl, and programs out of Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from engine.model_store import cache_folder

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())


def kubectl(*arguments, kubeconfig=None, check=True, timeout=120):
    """Runs kubectl; returns the completed process."""
    done = subprocess.run(
        [Path(sys.executable).with_name("kubectl"), *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=timeout,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": str(kubeconfig or "/nonexistent")},
    )  # fmt: skip
    assert not check or done.returncode == 0, f"kubectl {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}"
    return done


@cache
def debian_program(package, path):
    """A program out of a Debian package: the installed one, or one that is unpacked beside the models."""
    installed = shutil.which(Path(path).name)
    if installed:
        return Path(installed)
    folder = cache_folder() / "debian"
    found = folder / "unpacked" / path
    if found.exists():
        return found
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip(f"{package} is not installed, and this is no Debian that it could be fetched for")
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::State::Lists={folder / 'lists'}", "-o", "APT::Sandbox::User=root"]
    subprocess.run(["apt-get", *options, "-qq", "update"], check=True, capture_output=True, timeout=120)
    subprocess.run(["apt-get", *options, "-qq", "download", package], check=True, capture_output=True, cwd=folder)
    [archive] = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, folder / "unpacked"], check=True)
    return found
