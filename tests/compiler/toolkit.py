"""Fake CUDA toolkits: a directory with an nvcc that answers questions and "compiles" by copying a library."""

from __future__ import annotations

import os
from pathlib import Path

ALL_CODES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")

_NVCC = r"""#!/bin/sh
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
case "$*" in
  *--version*) echo "Cuda compilation tools, release @RELEASE@, V@RELEASE@.99"; exit 0;;
  *--list-gpu-code*) printf '%s\n' @CODES@; exit 0;;
  *--dryrun*)
    { echo "#\$ _HERE_=$here"; echo "#\$ TOP=$here/.."; echo "#\$ CICC_PATH=$here/../nvvm/bin"
      echo "#\$ LIBRARIES=  \"-L$here/../lib64/stubs\" \"-L$here/../lib64\""; } >&2
    exit 0;;
esac
out=; last=
for a in "$@"; do [ "$last" = -o ] && out=$a; last=$a; done
printf '%s\n' "$NVCC_APPEND_FLAGS|$CPATH|$*" >> "$here/../calls"
@BODY@
if [ "$out" = probe.so ]; then
  echo 'extern "C" int probe() { return 0; }' > fake.cpp && exec g++ -shared -fPIC -o probe.so fake.cpp
fi
exec cp '@LIBRARY@' "$out"
"""


class FakeToolkit:
    """A toolkit at ``root``: release, headers and assembler of chosen releases, targets, the newest gcc it accepts."""

    def __init__(self, root: Path, library: Path, release: str = "13.0", **changes) -> None:
        self.root, self.library, self.release = root, library, release
        headers, ptxas = changes.pop("headers", release), changes.pop("ptxas", release)
        self.codes = changes.pop("codes", ALL_CODES + (("sm_107",) if release >= "13.5" else ()))
        max_gcc, libraries = changes.pop("max_gcc", 99), changes.pop("libraries", "lib64")
        self.body = changes.pop("body", "")
        assert not changes
        major, minor = headers.split(".")
        self._write("include/cuda_runtime_api.h", f"#define CUDART_VERSION  {int(major) * 1000 + int(minor) * 10}\n")
        limit = f"#if __GNUC__ > {max_gcc}\n#error -- unsupported GNU version!\n#endif\n"
        limit += "#if (__clang_major__ >= 21) || (__clang_major__ < 3)\n#error -- unsupported clang version!\n#endif\n"
        self._write("include/crt/host_config.h", limit)
        self._write(f"{libraries}/libcudart_static.a", "")
        self._write("bin/ptxas", f"#!/bin/sh\necho 'Cuda compilation tools, release {ptxas}, V{ptxas}.99'\n")
        self._write("nvvm/bin/cicc", "#!/bin/sh\n")
        self.write_nvcc()

    @property
    def nvcc(self) -> Path:
        """The path of its nvcc."""
        return self.root / "bin" / "nvcc"

    def write_nvcc(self) -> None:
        """Write nvcc, after a change of ``release``, ``codes``, ``body`` or ``library``."""
        text = _NVCC
        for name, value in (("RELEASE", self.release), ("CODES", " ".join(self.codes)), ("BODY", self.body),
                            ("LIBRARY", str(self.library).replace("'", "'\\''"))):  # fmt: skip
            text = text.replace(f"@{name}@", value)
        self._write("bin/nvcc", text)

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """The compilations asked of it: ``NVCC_APPEND_FLAGS|CPATH|arguments``."""
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []


def path_without(*names: str) -> str:
    """PATH with no directory that holds one of the programs."""
    parts = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(part for part in parts if not any(os.path.exists(os.path.join(part, n)) for n in names))
