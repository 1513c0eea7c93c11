// LayerNorm over the last axis: x = (res - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + eps); and its gradient.
// The variance is the mean of squares about the mean, from a second pass over registers. Which rows a block owns:
// row_norm.cuh. Partial sums are added as in rmsnorm.cu. d_out may be the memory of d_res. Not measured.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, G (dtype of the gradients of weight and bias), C, N, GROUP, VPT, GROUPS, ROWS, BLOCKS, AHEAD, FORMS, E4M3 as
// rmsnorm.cu has them, RESIDUAL (0 or 1: of the gradient), BIAS (0 or 1: there is one, or its gradient is wanted)

#include "common.cuh"
#include "constants"
#include "forms.cuh"
#include "columns.cuh"
constexpr bool CENTERED = true, ADDED = false;
constexpr int OFFSET = 0;
#include "row_norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    layernorm_forward(OUTPUT_PARAMETERS(T, x), float* mean, float* rstd, const T* res, const T* weight, const T* bias,
                      float eps, i64 rows, i64 tall) {
    const T* residual = nullptr;
#include "norm_forward.cuh"
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    layernorm_backward(OUTPUT_PARAMETERS(T, d_out), float* partial, const T* d_x, const T* d_res, const T* res,
                       const T* weight, const float* mean, const float* rstd, int per_block, i64 rows, i64 tall) {
#include "norm_backward.cuh"
}

extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_weight(G* d_weight, const float* partial, int parts, int add) {
    sum_columns(d_weight, partial, parts, C, add);
}
