// x = residual + res * rstd * (weight + OFFSET), rstd = 1 / sqrt(mean(res^2) + eps): RMSNorm of what a sublayer adds to
// the stream. x may be the memory of the residual, of which a thread reads what it writes. Which rows a block owns:
// row_norm.cuh. Its gradient is rmsnorm_backward. Not measured.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, C, N, GROUP, VPT, GROUPS, ROWS, BLOCKS, AHEAD, FORMS, E4M3, OFFSET, as rmsnorm.cu has them

#include "common.cuh"
#include "constants"
#include "forms.cuh"
constexpr bool CENTERED = false, BIAS = false, ADDED = true;
#include "row_norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    post_norm_forward(OUTPUT_PARAMETERS(T, x), float* rstd, const T* res, const T* weight, const T* residual, float eps,
                      i64 rows, i64 tall) {
    float* mean = nullptr;
    const T* bias = nullptr;
#include "norm_forward.cuh"
}
