// RMSNorm over the last axis: x = res * rstd * (weight + OFFSET) with rstd = 1 / sqrt(mean(res^2) + eps); and its gradient.
//
// Which rows a block owns: row_norm.cuh. Backward writes one partial row of the weight's gradient per block (`parts` of
// them, a function of the shapes) and leaves their sum to `sum_weight`: the order never changes. d_out may be the memory
// of d_res.
//
// Measured on an H200 in bf16, at (32768, 896) and (16384, 3584): forward 95 and 97% of a copy, backward 90 and 92%; with
// fp8 in both layouts forward 83 and 77%, backward 82 and 77% (docs/kernels/memory-bound.md says what was tried).
//
// Architectures: 80 86 89 90 100 120
// Constants: T, G (dtype of the weight's gradient), C, N, GROUP, VPT, GROUPS, ROWS, BLOCKS (to a multiprocessor, at least),
// AHEAD (0 or 1: the next row is read while one is worked on), FORMS, E4M3, RESIDUAL (0 or 1), OFFSET

#include "common.cuh"
#include "constants"
#include "forms.cuh"
#include "columns.cuh"
constexpr bool CENTERED = false, BIAS = false, ADDED = false;
#include "row_norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rmsnorm_forward(OUTPUT_PARAMETERS(T, x), float* rstd, const T* res, const T* weight, float eps, i64 rows,
                    i64 tall) {
    float* mean = nullptr;
    const T *bias = nullptr, *residual = nullptr;
#include "norm_forward.cuh"
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rmsnorm_backward(OUTPUT_PARAMETERS(T, d_out), float* partial, const T* d_x, const T* d_res, const T* res,
                     const T* weight, const float* rstd, int per_block, i64 rows, i64 tall) {
    const float* mean = nullptr;
#include "norm_backward.cuh"
}

extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_weight(G* d_weight, const float* partial, int parts, int add) {
    sum_columns(d_weight, partial, parts, C, add);
}
