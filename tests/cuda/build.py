"""`python tests/cuda/build.py FOLDER`: builds the simulated CUDA runtime for the torch of this Python, below FOLDER.

It makes libcudart, libcuda and libnvidia-ml from `runtime/`, libnccl from `nccl.cpp`, the operators from `operators.cpp`, and a
stub of each other library that torch's own libraries name: with the right soname and the functions that they want, each of which
says that it is a stub, and fails. The headers are those of two wheels, which are only unpacked: `pip download` has put them into FOLDER/headers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = ("libcudart.so", "libcuda.so", "libnvidia-ml.so")
_OF_NVIDIA = re.compile("lib(cu|nv|nccl)")


def _output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None, "torch is not installed"
    return Path(str(spec.origin)).parent


def _libraries() -> list[Path]:
    folder = torch_folder()
    return [*folder.glob("lib/*.so*"), *folder.glob("_C*.so")]


def needed() -> set[str]:
    """The sonames of NVIDIA's libraries that torch's own name."""
    found = (re.findall(r"NEEDED.*\[(.*)\]", _output_of("readelf", "-d", path)) for path in _libraries())
    return {name for names in found for name in names if _OF_NVIDIA.match(name)}


def _symbols(paths: Iterable[Path], which: str) -> Iterator[tuple[str, str]]:
    """(name, version) of each symbol; the version is empty for most."""
    for path in paths:
        for line in _output_of("nm", *(["-D"] if ".so" in path.name else []), which, path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            yield name, version.lstrip("@")


# Whose functions have no version in the library that names them, or another one.
_PREFIXES = {
    "libcuda": "cu(?!File)[A-Z]", "libcufile": "cuFile", "libcusparseLt": "cusparseLt", "libnccl": "nccl", "libnvshmem_host": ".*nvshmem",
}  # fmt: skip


def wanted() -> dict[str, dict[str, str]]:
    """The functions that torch wants of each of these libraries, with their versions."""
    libraries = _libraries()
    defined = {name for name, _ in _symbols(libraries, "--defined-only")}
    found: dict[str, dict[str, str]] = {soname: {} for soname in needed() | {"libcuda.so.1", "libnvidia-ml.so.1"}}
    for name, version in _symbols(libraries, "--undefined-only"):
        if version in found:
            found[version][name] = version
        elif name not in defined:
            for soname, functions in found.items():
                prefix = _PREFIXES.get(soname.split(".")[0])
                if prefix is not None and re.match(prefix, name):
                    functions[name] = version
    # torch looks for these by `dlsym`, and refuses all of them if one is missing.
    api = (torch_folder() / "include/c10/cuda/driver_api.h").read_text(encoding="utf-8")
    found["libnvidia-ml.so.1"] |= dict.fromkeys(re.findall(r"_\((nvml\w+)\)", api), "")
    return found


# torch's profiler asks for the text of each refusal, and goes on without what was refused.
_WRITTEN = {
    "cuptiGetResultString": 'int cuptiGetResultString(int code, const char** text) { *text = "not simulated"; return 0; }\n'
}


def _stub(name: str) -> str:
    return (
        _WRITTEN.get(name)
        or f'int {name}(void) {{ fputs("simulated CUDA: {name} is a stub\\n", stderr); return 801; }}\n'
    )


def _link(target: Path, parts: Iterable[str | Path], functions: dict[str, str]) -> None:
    """Link a library of this name, with stubs of functions, under their versions."""
    source = target.with_suffix(".stubs.c")
    source.write_text("#include <stdio.h>\n" + "".join(map(_stub, sorted(functions))), encoding="utf-8")
    versions = target.with_suffix(".map")
    nodes = {version for version in functions.values() if version}
    versions.write_text(
        "".join(
            f"{node} {{ global: {' '.join(f'{n};' for n, v in functions.items() if v == node)} }};\n" for node in nodes
        ),
        encoding="utf-8",
    )
    script = [f"-Wl,--version-script={versions}"] if nodes else []
    _output_of(
        "g++",
        "-shared",
        "-fPIC",
        "-w",
        f"-Wl,-soname,{target.name}",
        *script,
        "-o",
        target,
        "-x",
        "c",
        source,
        "-x",
        "none",
        *parts,
    )


def _compile(source: Path, into: Path, *flags: str | Path) -> Path:
    made = into / f"{source.stem}.o"
    _output_of("g++", "-std=c++20", "-O1", "-fPIC", "-Wall", *flags, "-c", source, "-o", made)
    return made


def build(folder: Path) -> None:
    headers, parts, libraries = folder / "headers", folder / "parts", folder / "lib"
    for path in (parts, libraries):
        path.mkdir(parents=True, exist_ok=True)
    for wheel in headers.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(headers)
    [cuda] = headers.glob("nvidia/cu*/include")
    include = torch_folder() / "include"
    # C++ of torch with all warnings off: they are not about this file.
    of_torch = [
        "-w",
        "-DUSE_CUDA",
        f"-I{include}",
        f"-I{include}/torch/csrc/api/include",
        f"-I{sysconfig.get_path('include')}",
    ]
    with ThreadPoolExecutor(2) as pool:
        operators = pool.submit(_compile, HERE / "operators.cpp", parts, f"-I{cuda}", *of_torch)
        objects = list(pool.map(lambda source: _compile(source, parts, f"-I{cuda}"), HERE.glob("runtime/*.cpp")))
        nccl = _compile(HERE / "nccl.cpp", parts)
        functions = wanted()
        [cudart] = [soname for soname in functions if soname.startswith("libcudart.")]
        written = {name for name, _ in _symbols(objects, "--defined-only")}
        for soname, names in sorted(functions.items(), key=lambda one: one[0] != cudart):  # others are linked to it
            if soname != cudart:
                own: list[str | Path] = [nccl] if soname.startswith("libnccl.") else []
                has = written | {name for name, _ in _symbols([nccl] if own else [], "--defined-only")}
                missing = {name: version for name, version in names.items() if name not in has}
                if own or soname.startswith(RUNTIME):
                    own += [f"-L{libraries}", "-Wl,--no-as-needed", f"-l:{cudart}"]
                _link(libraries / soname, own, missing)
            else:
                _link_runtime(libraries / soname, objects, names, written)
        _output_of(
            "g++", "-shared", "-o", libraries / "libsim_operators.so", operators.result(), f"-L{torch_folder()}/lib", "-ltorch",
            "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda", f"-L{libraries}", f"-l:{cudart}",
            f"-Wl,-rpath-link,{libraries}",
        )  # fmt: skip


def _link_runtime(target: Path, objects: list[Path], names: dict[str, str], written: set[str]) -> None:
    """What torch wants and is not written fails loudly by its name; all has the version of the library."""
    source = target.with_suffix(".stubs.c")
    source.write_text("#include <stdio.h>\n" + "".join(map(_stub, sorted(names.keys() - written))), encoding="utf-8")
    versions = target.with_suffix(".map")
    versions.write_text(f"{target.name} {{ global: cuda*; __cuda*; }};\n", encoding="utf-8")
    stubs = target.with_suffix(".stubs.o")
    _output_of("gcc", "-fPIC", "-w", "-c", source, "-o", stubs)
    _output_of(
        "g++", "-shared", f"-Wl,-soname,{target.name}", f"-Wl,--version-script={versions}", "-o", target, *objects, stubs,
        "-ldl", "-lpthread",
    )  # fmt: skip
    (target.parent / "preload").write_text(target.name, encoding="utf-8")


def install() -> None:
    """Have torch load the operators whenever it is imported in this environment, where the runtime is preloaded."""
    packages = Path(sysconfig.get_path("purelib"))
    (packages / "cuda_simulation.pth").write_text(f"{HERE.parent / 'support'}\n", encoding="utf-8")
    about = packages / "cuda_simulation-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda-simulation\nVersion: 0\n", encoding="utf-8")
    told = "[torch.backends]\ncuda_simulation = cuda_simulation:load\n"
    (about / "entry_points.txt").write_text(told, encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
    install()
