"""Builds the two libraries of syncbn_cuda; what is decided, and how, is in build_support/.

Environment: SYNCBN_CUDA (1: fail without CUDA, 0: skip it), CUDA_HOME, TORCH_CUDA_ARCH_LIST, CXX,
MAX_JOBS, SOURCE_DATE_EPOCH.
"""

import os
import platform
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # build front ends run this file without its folder on the path
import build_support as support  # noqa: E402

support.check_setuptools(setuptools.__version__)
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402 - which older ones lack

FLAGS = support.flags_for(sys.platform)


def sources(*patterns):
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def declare_extensions():
    """Names and sources alone: metadata and sdist are made from them, without torch."""
    if FLAGS is None:
        return []
    cpu = sources("csrc/ops.cpp", "csrc/cpu/*.cpp")
    cuda = sources("csrc/cuda/*.cpp", "csrc/cuda/*.cu")
    return [
        setuptools.Extension(f"syncbn_cuda.{name}", files, py_limited_api=True, language="c++")
        for name, files in (("_cpu", cpu), ("_cuda", cuda))
    ]


class Distribution(setuptools.Distribution):
    def has_ext_modules(self):
        # Also where no library is built, so that build_ext runs and says so in the package, and the
        # wheel is tagged for this platform and offered to no other.
        return True


class BuildLibraries(build_ext):
    """Decides what to build, lets torch's build_ext do it, and notes what was decided and why.

    torch is imported in `run` and no earlier: setuptools makes such an object for metadata, too.
    """

    def get_ext_filename(self, fullname):
        # One name on every Python: the libraries hold no Python module and are found by this name.
        return f"{fullname.replace('.', os.sep)}.abi3.so"

    def run(self):
        torch = support.import_torch() if FLAGS is not None else None
        compiler = support.check_compiler() if FLAGS is not None else None
        plan = support.plan_cuda(
            FLAGS,
            platform.machine(),
            torch_hip=torch and torch.version.hip,
            device_count=torch.cuda.device_count() if torch else 0,
        )
        config = self.describe(torch, compiler, plan)
        print("syncbn_cuda:", *(f"\n  {key}: {value}" for key, value in config.items()), flush=True)

        # What an earlier build left must not get into this package.
        self.remove_outputs()
        if torch is not None:
            self.build(torch, plan)
        support.write_config(self.package_dir() / "_build_config.py", config)

    def build(self, torch, plan):
        # pip in an environment that is not activated leaves the ninja installed there off the path.
        os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")
        if plan.cuda is not None:
            os.environ["CUDA_HOME"] = str(plan.cuda.root)  # or torch guesses, and logs its guess
        from torch.utils import cpp_extension

        extensions = {ext.name: ext for ext in self.extensions}
        for ext in extensions.values():
            ext.include_dirs = [str(ROOT / "csrc"), *cpp_extension.include_paths("cpu")]
            ext.library_dirs = cpp_extension.library_paths("cpu")
        cpu, cuda = extensions["syncbn_cuda._cpu"], extensions["syncbn_cuda._cuda"]
        forget = support.forget_folders({ROOT: ".", Path(torch.__file__).parent: "torch"})
        cpu.extra_compile_args = {"cxx": [*FLAGS.cxx, *forget]}
        cpu.extra_link_args = list(FLAGS.link_cpu)
        self.extensions = [cpu]
        if plan.cuda is not None:
            cuda.include_dirs += plan.cuda.include_dirs
            cuda.library_dirs += plan.cuda.library_dirs
            cuda.extra_compile_args = {
                "cxx": [*FLAGS.cxx, *forget, "-DUSE_CUDA"],
                "nvcc": [*FLAGS.nvcc, *support.for_nvcc(forget), *plan.arch_flags],
            }
            cuda.extra_link_args = list(FLAGS.link_cuda)
            self.extensions.append(cuda)
            # torch knows no toolkit where it is a CPU build, and refuses one of another release
            # than its own. Neither matters: the libraries use its stable ABI and carry the CUDA
            # runtime.
            cpp_extension.CUDA_HOME = str(plan.cuda.root)
            cpp_extension._check_cuda_version = lambda *_: None

        class Builder(cpp_extension.BuildExtension):
            get_ext_filename = BuildLibraries.get_ext_filename

        builder = Builder(self.distribution)
        for option in ("build_lib", "inplace", "debug", "parallel", "editable_mode"):
            setattr(builder, option, getattr(self, option))
        # For an editable install setuptools compiles in a folder that it throws away; in one that
        # stays, a second install compiles only what has changed.
        builder.build_temp = "build/editable" if self.editable_mode else self.build_temp
        builder.ensure_finalized()
        builder.extensions = self.extensions
        if torch.version.cuda is None:
            self.remove_stale_objects(Path(builder.build_temp))
        builder.run()

    def describe(self, torch, compiler, plan):
        nvcc = plan.cuda and plan.cuda.version
        torch_cuda = torch and torch.version.cuda
        return {
            "version": self.distribution.get_version(),
            "torch": torch and str(torch.__version__),
            "torch_cuda": torch_cuda,
            "cpu": FLAGS is not None,
            "cpu_reason": None if FLAGS else f"no libraries are built on {sys.platform}",
            "cuda": plan.cuda is not None,
            "cuda_reason": plan.reason,
            "cuda_note": support.version_note(nvcc, torch_cuda),
            "nvcc": plan.cuda and str(plan.cuda.nvcc),
            "nvcc_version": nvcc,
            "archs": plan.archs,
            "compiler": compiler,
            "flags": {
                "cxx": FLAGS.cxx if FLAGS else [],
                "nvcc": [*FLAGS.nvcc, *plan.arch_flags] if plan.cuda else [],
            },
        }

    def package_dir(self):
        folder = ROOT if self.inplace else Path(self.build_lib)
        return folder / "syncbn_cuda"

    def remove_outputs(self):
        for name in ("_cpu.abi3.so", "_cuda.abi3.so"):
            (self.package_dir() / name).unlink(missing_ok=True)
        self.package_dir().mkdir(parents=True, exist_ok=True)

    def remove_stale_objects(self, build_temp):
        # Beside a torch without CUDA, torch's ninja rules do not see which headers a .cu includes.
        newest = max(path.stat().st_mtime for path in ROOT.glob("csrc/**/*.*"))
        for path in build_temp.glob("csrc/cuda/*.o"):
            if path.stat().st_mtime < newest:
                path.unlink()


class Wheel(bdist_wheel):
    def write_wheelfile(self, *args, **kwargs):
        super().write_wheelfile(*args, **kwargs)  # the last file but the list of all
        support.settle_modes(Path(self.bdist_dir))


if __name__ == "__main__":
    support.settle_time()
    # A free-threaded Python takes no abi3 wheel: there the wheel is one for this Python alone.
    limited = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp310"}
    setuptools.setup(
        distclass=Distribution,
        ext_modules=declare_extensions(),
        cmdclass={"bdist_wheel": Wheel, "build_ext": BuildLibraries},
        options={"bdist_wheel": limited},
    )
