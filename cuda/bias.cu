// d_bias (columns,) <- the partial column sums (parts, columns) that the gradient's producer left.
//
// Architectures: 80 86 89 90 100 120
// Constants: G (dtype of the gradient)

#include "common.cuh"
#include "constants"
#include "columns.cuh"

extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)
    bias_backward(G* d_bias, const float* partial, int parts, int columns, int add) {
    sum_columns(d_bias, partial, parts, columns, add);
}
