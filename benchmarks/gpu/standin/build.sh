#!/usr/bin/env bash
# Makes a Python that believes in a GPU, of one with a CUDA build of PyTorch on a machine without any:
#
#     benchmarks/gpu/standin/build.sh PYTHON FOLDER
#     PYTHON=FOLDER/python OUT=figures benchmarks/gpu/run.sh --stages memory --seconds 600
#
# No kernel runs (standin.c says what does), so the memory of steps is the only figure that means
# something. Kernels of cuDNN are left out, which chooses at run time what it takes: attention is
# flash attention's, and convolutions and recurrent layers are those without it. Needs gcc and nm.
set -euo pipefail

python=$(command -v "$1")
mkdir -p "$2"
folder=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)

libraries=$("$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent / "lib")' 2>/dev/null)
cudnn=$("$python" -c 'import torch; print(torch._C._cudnn.getCompileVersion() and "%d%02d%02d" % torch._C._cudnn.getCompileVersion())')
gcc -shared -fPIC -w -O1 -DCUDNN="$cudnn" -o "$folder/known.so" "$here/standin.c"
nm -D --defined-only "$folder/known.so" | awk '{print $3}' | sort -u >"$folder/known"
for library in "$libraries"/libtorch_cuda*.so "$libraries"/libc10_cuda.so "$libraries"/libtorch_python.so; do
  nm -D --undefined-only "$library" | awk '{print $2}' | sed 's/@.*//'
done | grep -E '^(cu|nccl|__cuda|nvrtc|nvml|cusolver|cufft)' | sort -u | comm -23 - "$folder/known" |
  awk '{print "int " $1 "() { return 0; }"}' >"$folder/rest.c"
# what the driver's own library has is asked for by its name, of the same one
for name in CtxGetCurrent CtxSetCurrent DevicePrimaryCtxRetain FuncGetAttribute FuncSetAttribute \
  FuncSetCacheConfig GetErrorString LaunchCooperativeKernel LaunchKernel LinkAddData_v2 LinkComplete \
  LinkCreate_v2 MemAddressFree MemMap MemRelease MemSetAccess MemExportToShareableHandle \
  MemImportFromShareableHandle ModuleGetFunction ModuleLoad ModuleLoadData ModuleLoadDataEx \
  ModuleUnload OccupancyMaxActiveBlocksPerMultiprocessor PointerGetAttribute TensorMapEncodeTiled \
  MulticastAddDevice MulticastBindMem MulticastCreate MulticastUnbind DeviceGetAttribute MemRetainAllocationHandle MemGetAllocationPropertiesFromHandle MemsetD32Async \
  StreamWriteValue32 CtxFromGreenCtx CtxPopCurrent CtxPushCurrent DeviceGetDevResource; do
  grep -qx "cu$name" "$folder/known" || grep -q "int cu$name()" "$folder/rest.c" ||
    echo "int cu$name() { return 0; }"
done >"$folder/driver.c"
sources=("$here/standin.c" "$folder/rest.c" "$folder/driver.c")
gcc -shared -fPIC -w -O1 -DCUDNN="$cudnn" -o "$folder/standin.so" "${sources[@]}"
ln -sf standin.so "$folder/libcuda.so.1"

mkdir -p "$folder/site"
cat >"$folder/site/sitecustomize.py" <<'PYTHON'
import torch

torch.backends.cuda.enable_cudnn_sdp(False)
torch.backends.cudnn.enabled = False
PYTHON
cat >"$folder/python" <<SHELL
#!/bin/sh
export PYTHONPATH="$folder/site\${PYTHONPATH:+:\$PYTHONPATH}" LD_LIBRARY_PATH="$folder"
LD_PRELOAD="$folder/standin.so" exec "$python" "\$@"
SHELL
chmod +x "$folder/python"
"$folder/python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
