// What ranks have sent this one, added up in f32 in the order of ranks, with its own in its place among them; see the
// reference. Memory-bound: each number is read and written once.
//
// Architectures: 80 86 89 90 100 120
// Constants: O, X, P (dtypes of the sum, of this rank's own, of the others' pieces), N

#include "common.cuh"
#include "constants"

// out (count,) <- own (count,), pieces (others, count); added to what is there with `accumulate`. out may be own.
extern "C" __global__ void __launch_bounds__(256)
    sum_pieces(O* out, const X* own, const P* pieces, i64 count, int others, int rank, int accumulate) {
    i64 step = static_cast<i64>(gridDim.x) * 256 * N;
    for (i64 at = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * N; at < count; at += step) {
        float total[N], mine[N], other[N];
        load(own + at, mine);
        for (int piece = 0; piece <= others; piece++) {
            if (piece != rank) load(pieces + (piece - (piece > rank)) * count + at, other);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float x = piece == rank ? mine[j] : other[j];
                total[j] = piece ? total[j] + x : x;
            }
        }
        if (accumulate) {
            load(static_cast<const O*>(out) + at, other);
#pragma unroll
            for (int j = 0; j < N; j++) total[j] = other[j] + total[j];
        }
        store(out + at, total);
    }
}
