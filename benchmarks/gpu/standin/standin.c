/* A stand-in for CUDA's driver and runtime, NCCL and cuBLAS, under a CUDA build of PyTorch on a machine
   without a GPU: no kernel runs, and every call says that it went well.

   What runs is PyTorch's own code on the host: its caching allocator, and all that decides what an
   operator allocates. So the memory of a step is what it would be, and no number or time is. Memory of
   the "device" is address space that nothing is written to, but for the first bytes of small copies,
   which PyTorch reads back (lengths, seeds); so steps of tens of GiB fit on a laptop.

   build.sh adds every other function of these libraries as one that returns 0. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long u64;
typedef unsigned int u32;

enum { OUT_OF_MEMORY = 2, SMALL = 64 * 1024, PAGE = 4096, MOST = 1 << 18 };
static const size_t CAPACITY = 80ull << 30, GRANULARITY = 2u << 20;
static size_t used;
static struct { void *at; size_t size; } taken[MOST];
static int count;
static u64 handle = 16;

static void *made(void) { return (void *)(handle += 16); }

static void *room(size_t size) {
  void *at = mmap(0, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? 0 : at;
}

/* ---- memory ---- */
int cudaMalloc(void **at, size_t size) {
  if (used + size > CAPACITY || count == MOST || !(*at = room(size))) return OUT_OF_MEMORY;
  used += size;
  taken[count].at = *at;
  taken[count++].size = size;
  return 0;
}
int cudaFree(void *at) {
  for (int i = 0; at && i < count; i++)
    if (taken[i].at == at) {
      munmap(at, taken[i].size + PAGE);
      used -= taken[i].size;
      taken[i] = taken[--count];
      break;
    }
  return 0;
}
int cudaMemGetInfo(size_t *free_, size_t *all) { *all = CAPACITY; *free_ = CAPACITY - used; return 0; }
int cudaHostAlloc(void **at, size_t size) { return (*at = room(size)) ? 0 : OUT_OF_MEMORY; }
int cudaHostGetDevicePointer(void **device, void *host) { *device = host; return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size) {
  if (size < SMALL) memcpy(to, from, size);
  else memcpy((char *)to + size - PAGE, (char *)from + size - PAGE, PAGE); /* where ranks leave notes */
  return 0;
}
int cudaMemcpy(void *to, const void *from, size_t size) { return cudaMemcpyAsync(to, from, size); }
int cudaMemsetAsync(void *at, int value, size_t size) { if (size < SMALL) memset(at, value, size); return 0; }
int cudaPointerGetAttributes(void *found) { memset(found, 0, 32); return 0; }

/* ---- expandable segments: what is reserved is there, and mapping it only counts ---- */
int cuMemGetAllocationGranularity(size_t *size) { *size = GRANULARITY; return 0; }
int cuMemAddressReserve(u64 *at, size_t size) { return (*at = (u64)room(size)) ? 0 : OUT_OF_MEMORY; }
int cuMemCreate(u64 *found, size_t size) {
  if (used + size > CAPACITY) return OUT_OF_MEMORY;
  used += size;
  *found = (u64)made();
  return 0;
}
int cuMemUnmap(u64 at, size_t size) { used -= size; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }

/* ---- the device: a Hopper of 132 multiprocessors and 80 GiB ---- */
int cudaGetDeviceCount(int *found) { *found = 1; return 0; }
int cudaGetDevice(int *found) { *found = 0; return 0; }
int cudaDriverGetVersion(int *found) { *found = 13000; return 0; }
int cudaRuntimeGetVersion(int *found) { *found = 13000; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
int cudaDeviceGetAttribute(int *value, int which) {
  switch (which) {
    case 75: *value = 9; break;      /* compute capability */
    case 76: *value = 0; break;
    case 16: *value = 132; break;    /* multiprocessors */
    case 8: *value = 49152; break;   /* shared memory a block */
    case 97: *value = 232448; break; /* the same, asked for */
    case 39: *value = 2048; break;   /* threads a multiprocessor */
    default: *value = 1024;
  }
  return 0;
}
int cudaGetDeviceProperties(char *found) { /* offsets of CUDA 13's cudaDeviceProp */
  memset(found, 0, 1008);
  for (int i = 392; i < 900; i += 4) *(int *)(found + i) = 2048;
  strcpy(found, "stand-in, no GPU");
  *(size_t *)(found + 288) = CAPACITY;
  *(size_t *)(found + 296) = 49152;
  *(int *)(found + 304) = 65536;
  *(int *)(found + 308) = 32; /* warp */
  *(int *)(found + 320) = *(int *)(found + 324) = *(int *)(found + 328) = 1024;
  *(int *)(found + 332) = 64;
  *(int *)(found + 336) = 2147483647;
  *(int *)(found + 340) = *(int *)(found + 344) = 65535;
  *(int *)(found + 360) = 9; /* compute capability */
  *(int *)(found + 384) = *(int *)(found + 388) = 132;
  return 0;
}
int cudaFuncGetAttributes(char *found) {
  memset(found, 0, 144);
  *(int *)(found + 24) = 1024;
  *(int *)(found + 28) = 32;
  *(int *)(found + 32) = *(int *)(found + 36) = 90;
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { *blocks = 2; return 0; }
int cuDevicePrimaryCtxGetState(int device, u32 *flags, int *active) { *flags = 0; *active = 0; return 0; }

/* ---- streams and events: everything is done at once ---- */
int cudaStreamCreateWithPriority(void **found) { *found = made(); return 0; }
int cudaStreamCreateWithFlags(void **found) { *found = made(); return 0; }
int cudaEventCreateWithFlags(void **found) { *found = made(); return 0; }
int cudaEventCreate(void **found) { *found = made(); return 0; }
int cudaEventElapsedTime(float *milliseconds) { *milliseconds = 1; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status, u64 *id) { *status = 0; if (id) *id = 0; return 0; }
int cudaStreamGetCaptureInfo_v2(void *s, int *status, u64 *id) { return cudaStreamGetCaptureInfo(s, status, id); }
int cudaStreamGetCaptureInfo_v3(void *s, int *status, u64 *id) { return cudaStreamGetCaptureInfo(s, status, id); }
int __cudaPopCallConfiguration(void *grid, void *block, u64 *shared) { *shared = 0; return 0; }
void **__cudaRegisterFatBinary(void) { static void *any; return &any; }
int cudaGetDriverEntryPointByVersion(const char *name, void **found, u32 version, u64 flags, int *status) {
  *found = dlsym(RTLD_DEFAULT, name);
  if (status) *status = *found ? 0 : 1;
  return 0;
}
char *cudaGetErrorString(int error) { return error == OUT_OF_MEMORY ? "out of memory" : "none"; }
char *cudaGetErrorName(int error) { return cudaGetErrorString(error); }

/* ---- NCCL: of one rank, whose collectives change nothing ---- */
int ncclGetVersion(int *found) { *found = 22809; return 0; }
int ncclGetUniqueId(char *found) { memset(found, 1, 128); return 0; }
int ncclCommInitRank(void **found) { *found = malloc(64); return 0; }
int ncclCommInitRankConfig(void **found) { return ncclCommInitRank(found); }
int ncclCommInitRankScalable(void **found) { return ncclCommInitRank(found); }
int ncclCommGetAsyncError(void *comm, int *error) { *error = 0; return 0; }
int ncclCommCount(void *comm, int *found) { *found = 1; return 0; }
int ncclCommUserRank(void *comm, int *found) { *found = 0; return 0; }
char *ncclGetErrorString(int error) { return "none"; }
char *ncclGetLastError(void *comm) { return "none"; }

/* ---- cuBLAS and cuDNN: handles and versions ---- */
int cublasCreate_v2(void **found) { *found = malloc(64); return 0; }
int cublasLtCreate(void **found) { *found = malloc(64); return 0; }
int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n, char *found, int *count_) {
  memset(found, 0, 96);
  *count_ = 1;
  return 0;
}
u64 cudnnGetVersion(void) { return CUDNN; }
int cudnnGetProperty(int which, int *found) { *found = which == 0 ? CUDNN / 10000 : which == 1 ? CUDNN / 100 % 100 : CUDNN % 100; return 0; }
